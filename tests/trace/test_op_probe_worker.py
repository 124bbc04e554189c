"""Single operators run for real, their temporaries known by hand. ``pytest tests/trace/test_op_probe_worker.py``."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memfit.trace import op_probe_worker
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


def test_an_operator_of_a_known_library_is_probed_and_the_library_imported_for_it() -> None:
    # One step of 8-bit Adam: both moments dequantised, the scaled gradient, a root and the denominator, each of 4096
    # elements x 4 B; and a few bytes for numbers that operators wrap in tensors. Nothing is returned.
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    codes, table, scales = tensor(64, 64, dtype="uint8"), tensor(256), tensor(16)
    numbers = [0.9, 0.999, 0.0, 0.0, 1e-8, 2, 1e-3]
    arguments = [
        "adam",
        tensor(64, 64),
        tensor(64, 64),
        codes,
        codes,
        *numbers,
        table,
        table,
        scales,
        scales,
        0.01,
        1.0,
    ]
    requests = [(0, "bitsandbytes.optimizer_update_8bit_blockwise.default", arguments, {})]
    # In a process of its own: here the library may have been imported by another test.
    stream = io.BytesIO()
    for message in ({"threads": 1, "largest_bytes": 2**30}, requests):
        write_message(stream, message)
    worker = subprocess.run(
        [sys.executable, op_probe_worker.__file__], input=stream.getvalue(), capture_output=True, check=True
    )
    answers = io.BytesIO(worker.stdout)
    assert read_message(answers) == "ready"
    peak, outputs, _ = read_message(answers)[0]
    assert 5 * 4096 * 4 <= peak < 5 * 4096 * 4 + 64
    assert outputs == {}


def test_importing_a_library_for_a_probe_sets_up_no_compiler() -> None:
    compiles = torch.compile
    with op_probe_worker._without_compiling():
        assert torch.compile(run) is run
        assert torch.compile(dynamic=False)(run) is run  # type: ignore[call-overload]
    assert torch.compile is compiles


def test_no_other_library_is_imported_on_the_word_of_a_request() -> None:
    answer = run(("antigravity.fly.default", [], {}))[0]
    assert answer.startswith("AttributeError: ")
    assert "antigravity" not in sys.modules


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


def test_on_a_gpu_the_allocator_tells_the_peak_of_the_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors of "meta" stand for those of a GPU; torch.cuda says 10,000 bytes before, and at most 16,144 within.
    asked: list[str] = []

    def answering(name: str, answer: int | None) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda: asked.append(name) or answer)  # type: ignore[func-returns-value]

    answering("synchronize", None)
    answering("reset_peak_memory_stats", None)
    answering("memory_allocated", 10_000)
    answering("max_memory_allocated", 16_144)
    answering("empty_cache", None)
    prober = Prober(2**30, "meta")
    zeros = (1, "aten.zeros.default", [[3]], {"device": torch.device("cpu")})
    requests = [(0, "aten.cos.default", [tensor(1000)], {}), zeros]
    answers = prober.run(requests)
    peak, outputs, shapes = answers[0]
    # The output has 4,000 bytes, in blocks of 512 bytes 4,096; 6,144 - 4,096 bytes are hidden.
    assert (peak, outputs) == (6_144, {0: 4_096})
    assert shapes[0] == ("float32", (1000,), (1,))
    assert answers[1][1] == {0: 512}  # made where the arguments are, not on the CPU
    assert asked[:4] == ["synchronize", "reset_peak_memory_stats", "memory_allocated", "synchronize"]
    assert asked[-1] == "empty_cache" and asked.count("empty_cache") == 1
    assert prober.run(requests) == answers


def test_what_fails_on_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    answers = Prober(3999, "meta").run([(0, "aten.cos.default", [tensor(1000)], {})])
    assert answers[0].startswith("MemoryError: an argument of 4000 bytes")


class Gpus:
    """Two GPUs, of which the second has 8 of its 10 GB free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, Any]] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=("aa-1", "bb-2")[i]))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.done.append(("device", device)))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8_000, 10_000))
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda share: self.done.append(("share", share))
        )


def test_a_gpu_is_found_by_its_identifier_and_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert op_probe_worker.set_up_gpu("cuda:0", "bb-2", {"cudnn.benchmark": True}) == "cuda:1"
    # Nine tenths of the 8 GB that are free, of 10 GB.
    assert gpus.done == [("device", "cuda:1"), ("share", pytest.approx(0.72))]
    assert torch.backends.cudnn.benchmark is True


def test_a_gpu_without_an_identifier_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch)
    assert op_probe_worker.set_up_gpu("cuda:0", None, {}) == "cuda:0"
    assert gpus.done[0] == ("device", "cuda:0")


def test_a_process_on_a_gpu_that_is_gone_says_so_and_ends() -> None:
    stream = io.BytesIO()
    write_message(stream, {"threads": 1, "largest_bytes": 2**30, "device": "cuda:0", "uuid": "no-such", "backends": {}})
    worker = subprocess.run(
        [sys.executable, op_probe_worker.__file__], input=stream.getvalue(), capture_output=True, check=True
    )
    said = read_message(io.BytesIO(worker.stdout))
    assert said.startswith("RuntimeError: the GPU no-such is not among those that this process sees: ")
