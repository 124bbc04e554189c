"""The timeline is plain data. Run: ``pytest tests/trace/test_timeline.py``."""

from __future__ import annotations

import pickle

from lightning_memfit.trace.timeline import Free, Operation, Output, Resident, Signature, TensorShape, Timeline


def test_a_timeline_is_plain_data_that_can_be_kept() -> None:
    timeline = Timeline(
        residents=(Resident(0, 100, "parameters"), Resident(1, 20, "inputs")),
        events=(Operation("aten.cos.default", "head", "forward", 0, (Output(2, 0, 20),)), Free(2, "backward")),
        categories={2: "activations"},
        signatures=(Signature("aten.cos.default", (TensorShape("float32", (5,), (1,), None),), {}),),
        num_parameters=25,
        num_operations=3,
        flops=0,
        recomputed_flops=0,
    )
    assert timeline.resident_bytes == 120
    assert pickle.loads(pickle.dumps(timeline)) == timeline
