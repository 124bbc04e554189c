"""Single operators run for real, their temporaries known by hand. ``pytest tests/trace/test_op_probe_worker.py``."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from lightning_memfit.trace.op_probe_worker import Prober, read_message, real_shape, write_message


def tensor(*size: int, dtype: str = "float32", stride: tuple[int, ...] | None = None, origin: Any = None) -> Any:
    if stride is None:
        stride = tuple(torch.empty(size, device="meta").stride())
    return ("tensor", dtype, size, stride, origin)


def run(*requests: Any, largest_bytes: int = 2**30) -> dict[int, Any]:
    return Prober(largest_bytes).run([(number, *request) for number, request in enumerate(requests)])


def test_an_operator_without_temporaries_needs_its_output() -> None:
    answers = run(("aten.mul.Tensor", [tensor(100, 10), tensor(100, 10)], {}))
    assert answers[0] == (4000, {0: 4000}, {0: ("float32", (100, 10), (10, 1))})


def test_temporaries_inside_an_operator_are_found() -> None:
    # logsumexp holds the shifted exponentials (1000 x 10 x 4 B) beside its output (1000 x 4 B).
    answers = run(("aten.logsumexp.default", [tensor(1000, 10), [1]], {}))
    peak, outputs, _ = answers[0]
    assert outputs == {0: 4000}
    assert peak >= 4000 + 40_000


def test_a_convolution_hides_more_than_its_output() -> None:
    arguments = [tensor(2, 3, 32, 32), tensor(8, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    peak, outputs, _ = run(("aten.convolution.default", arguments, {}))[0]
    assert outputs == {0: 2 * 8 * 32 * 32 * 4}
    assert peak > outputs[0]


def test_in_place_operators_allocate_nothing() -> None:
    assert run(("aten.add_.Tensor", [tensor(10), tensor(10)], {"alpha": 2}))[0][:2] == (0, {})


def test_outputs_that_share_a_storage_count_once() -> None:
    peak, outputs, shapes = run(("aten.split.Tensor", [tensor(10), 5], {}))[0]
    assert (peak, outputs) == (0, {})
    assert len(shapes) == 2


def test_an_operator_that_refuses_its_arguments_is_reported_and_the_others_are_run() -> None:
    answers = run(
        ("aten.mm.default", [tensor(2, 3), tensor(4, 5)], {}),
        ("aten.cos.default", [tensor(5)], {}),
        ("aten.no_such_operator.default", [], {}),
    )
    assert answers[0].startswith("RuntimeError: ")
    assert answers[1][0] == 20
    assert answers[2].startswith("AttributeError: ")


def test_arguments_above_the_limit_are_refused() -> None:
    answer = run(("aten.cos.default", [tensor(1000)], {}), largest_bytes=3999)[0]
    assert answer == "MemoryError: an argument of 4000 bytes is more than a probe may allocate"


def test_expanded_and_strided_arguments_are_made_as_described() -> None:
    # An expanded argument is as small as one element; cos of it is as large as its shape.
    answers = run(("aten.cos.default", [tensor(1000, stride=(0,))], {}), largest_bytes=8)
    assert answers[0][1] == {0: 4000}


def test_an_argument_takes_the_dtype_that_its_maker_really_gave() -> None:
    # LayerNorm statistics of bfloat16 inputs under float32 weights are float32 whatever the fake run says.
    half = "bfloat16"
    answers = run(
        ("aten.native_layer_norm.default", [tensor(4, 8, dtype=half), [8], tensor(8), tensor(8), 1e-5], {}),
        ("aten.cos.default", [tensor(4, 1, dtype=half, origin=(0, 1))], {}),
    )  # fmt: skip
    assert answers[0][2][1][0] == "float32"
    assert answers[1][1] == {0: 16}


def test_real_shapes_replace_claimed_ones_only_where_they_must() -> None:
    assert real_shape(("uint8", (0,), (1,)), ("uint8", (99,), (1,))) == ("uint8", (99,), (1,))
    assert real_shape(("bfloat16", (4,), (2,)), ("float32", (4,), (1,))) == ("float32", (4,), (2,))
    assert real_shape(("bfloat16", (2, 2), (2, 1)), ("float32", (4,), (1,))) == ("bfloat16", (2, 2), (2, 1))


def test_gradients_are_left_alone_and_grad_mode_comes_back() -> None:
    with torch.no_grad():
        run(("aten.cos.default", [tensor(5)], {}))
        assert not torch.is_grad_enabled()


def test_messages_pass_through_a_stream_and_its_end_is_none() -> None:
    stream = io.BytesIO()
    write_message(stream, {"a": (1, [2])})
    write_message(stream, None)
    stream.seek(0)
    assert read_message(stream) == {"a": (1, [2])}
    assert read_message(stream) is None
    assert read_message(stream) is None


@pytest.mark.parametrize("name", ["_prepare_profiler", "_enable_profiler", "_disable_profiler"])
def test_torch_still_has_the_profiler_that_probing_uses(name: str) -> None:
    assert hasattr(torch._C._autograd, name), f"torch {torch.__version__}: change trace/op_probe_worker.py"
