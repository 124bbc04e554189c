"""The probing process and the file of its results. Run: ``pytest tests/trace/test_op_probe.py``."""

from __future__ import annotations

import json
import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace import op_probe
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.timeline import Signature, TensorShape
from lightning_memfit.trace.training_step import program_of, trace_window


def shape(*size: int, origin: tuple[int, int] | None = None) -> TensorShape:
    return TensorShape("float32", size, tuple(torch.empty(size, device="meta").stride()), origin)


COS = Signature("aten.cos.default", (shape(100),), {})
SIN = Signature("aten.sin.default", (shape(50),), {})


def test_hidden_temporaries_of_a_convolution_are_found(prober: OperatorProber) -> None:
    module = nn.Conv2d(3, 8, 3, padding=1)
    program = program_of(module, loss=lambda m, b: m(b).sum(), optimizer=partial(torch.optim.SGD, lr=0.1))
    timeline = trace_window(program, torch.zeros(2, 3, 32, 32))
    probes = prober.probe(timeline.signatures)
    assert not probes.failures and not probes.notes
    (number,) = (n for n, s in enumerate(timeline.signatures) if s.op == "aten.convolution.default")
    found = probes.results[number]
    assert found.output_bytes == {0: 2 * 8 * 32 * 32 * 4}
    assert found.peak_bytes > found.output_bytes[0]
    blind, probed = predict_memory(timeline), predict_memory(timeline, probes.results)
    assert probed.peak_allocated_bytes > blind.peak_allocated_bytes


def test_a_known_call_is_not_run_again(prober: OperatorProber, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prober.probe([COS, SIN])
    monkeypatch.setattr(prober, "_ask", lambda requests: pytest.fail("asked again"))
    assert prober.probe([SIN, COS]).results == {0: first.results[1], 1: first.results[0]}


def test_results_are_kept_in_a_file_and_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with OperatorProber(cache_dir=tmp_path / "deep" / "cache", largest_bytes=300) as prober:
        found = prober.probe([COS, SIN])
        process = prober._process
        assert process is not None and process.poll() is None
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    prober.close()  # a second time
    # 100 float32 are 400 bytes, above the limit; 50 are below.
    assert found.failures == {
        "aten.cos.default": "MemoryError: an argument of 400 bytes is more than a probe may allocate"
    }
    assert found.notes == (
        "aten.cos.default could not be probed (MemoryError: an argument of 400 bytes is more than a probe may "
        "allocate); temporaries inside it are not in the forecast",
    )
    (file,) = (tmp_path / "deep" / "cache").glob("operators-*.json")
    assert len(json.loads(file.read_text())) == 1  # failures are tried again another time
    with OperatorProber(cache_dir=tmp_path / "deep" / "cache") as again:
        monkeypatch.setattr(again, "_ask", lambda requests: pytest.fail("asked again"))
        assert again.probe([SIN]).results == {0: found.results[1]}
        assert again._process is None


def test_a_cache_that_cannot_be_written_costs_probing_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with OperatorProber(cache_dir=tmp_path / "file" / "cache") as prober:
        assert prober.probe([SIN]).results


@pytest.mark.parametrize("contents", [b"{", b"\xff\xfe\x00", b"[1, 2]", b'{"key": [1, 2]}', b'{"key": "text"}', b""])
def test_a_damaged_file_is_read_as_empty(tmp_path: Path, contents: bytes) -> None:
    file = OperatorProber(cache_dir=tmp_path)._cache_file
    assert file is not None
    file.write_bytes(contents)
    assert OperatorProber(cache_dir=tmp_path)._known == {}


def _write(path: Path, start: int) -> None:
    for number in range(start, start + 20):
        op_probe._write_cache(path, {str(number): [number, {}, {}], f"failed {number}": "reason"})


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "operators.json"
    context = multiprocessing.get_context("fork")
    writers: list[Any] = [context.Process(target=_write, args=(path, start)) for start in (0, 20, 40)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert set(op_probe._read_cache(path)) == {str(number) for number in range(60)}
    assert not list(tmp_path.glob("*.tmp"))


# Speaks the protocol without torch, so that it starts at once; dies where it would have to run a cosine.
_CRASHING_WORKER = """
import os, pickle, struct, sys
def read():
    header = sys.stdin.buffer.read(8)
    return pickle.loads(sys.stdin.buffer.read(struct.unpack("<Q", header)[0])) if header else None
def write(message):
    data = pickle.dumps(message)
    sys.stdout.buffer.write(struct.pack("<Q", len(data)) + data)
    sys.stdout.buffer.flush()
read()
write("ready")
while (requests := read()) is not None:
    if any("cos" in op for _, op, _, _ in requests):
        os._exit(9)
    write({number: (200, {0: 200}, {0: ("float32", (50,), (1,))}) for number, *_ in requests})
"""


def test_an_operator_that_ends_its_process_is_named_and_the_others_are_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported in deepspeedai/DeepSpeed#4759, deepspeedai/DeepSpeed#7269."""
    monkeypatch.setattr(op_probe, "_WORKER", tmp_path / "worker.py")
    op_probe._WORKER.write_text(_CRASHING_WORKER)
    others = [Signature("aten.sin.default", (shape(size),), {}) for size in range(1, 8)]
    with OperatorProber() as prober:
        probes = prober.probe([*others[:3], COS, *others[3:]])
    assert probes.failures == {"aten.cos.default": "the probing process ended with code 9"}
    assert set(probes.results) == {0, 1, 2, 4, 5, 6, 7}


def test_a_process_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(3)\n")
    monkeypatch.setattr(op_probe, "_WORKER", worker)
    with OperatorProber() as prober:
        probes = prober.probe([COS])
    assert probes.failures == {"aten.cos.default": "the probing process ended with code 3"}
    assert not probes.results


_REFUSING_WORKER = """
import os, pathlib, pickle, struct, sys
pathlib.Path(__file__).with_suffix(".starts").open("a").write("s")
data = pickle.dumps("RuntimeError: the GPU is another process's")
sys.stdout.buffer.write(struct.pack("<Q", len(data)) + data)
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
"""


def test_a_process_that_says_why_it_takes_no_requests_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(op_probe, "_WORKER", tmp_path / "worker.py")
    op_probe._WORKER.write_text(_REFUSING_WORKER)
    with OperatorProber() as prober:
        probes = prober.probe([COS, SIN])
    reason = "RuntimeError: the GPU is another process's"
    assert probes.failures == {COS.op: reason, SIN.op: reason}
    assert (tmp_path / "worker.starts").read_text() == "s"


def test_answers_are_waited_for_no_longer_than_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(op_probe, "_WORKER", tmp_path / "worker.py")
    op_probe._WORKER.write_text(_CRASHING_WORKER.replace("os._exit(9)", "__import__('time').sleep(60)"))
    with OperatorProber(seconds=1.0) as prober:
        assert set(prober.probe([SIN]).results) == {0}
        assert prober.probe([SIN, COS]).failures == {COS.op: "not run within 1 seconds"}
        assert prober._process is None
        monkeypatch.setattr(prober, "start", lambda: pytest.fail("started again"))
        other = Signature("aten.sin.default", (shape(7),), {})
        assert prober.probe([other]).failures == {SIN.op: "not run within 1 seconds"}


def test_a_process_that_was_ended_is_started_again_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(op_probe, "_WORKER", tmp_path / "worker.py")
    op_probe._WORKER.write_text(_CRASHING_WORKER)
    with OperatorProber() as prober:
        assert prober.probe([SIN]).results
        first = prober._process
        prober.end_process()
        assert first is not None and first.poll() is not None
        assert prober.probe([SIN]).results and prober._process is None  # known
        assert prober.probe([Signature("aten.sin.default", (shape(9),), {})]).results
        assert prober._process is not None


def test_the_process_learns_which_gpu_and_which_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[Any] = []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(op_probe, "_WORKER", tmp_path / "worker.py")
    op_probe._WORKER.write_text(_CRASHING_WORKER)
    monkeypatch.setattr(op_probe.op_probe_worker, "write_message", lambda stream, message: written.append(message))
    with OperatorProber(device="cuda:3", uuid="1234-56") as prober:
        prober.start()
    assert (written[0]["device"], written[0]["uuid"]) == ("cuda:3", "1234-56")
    assert written[0]["backends"]["cudnn.benchmark"] is True
    assert set(written[0]["backends"]) == set(op_probe._CHOICES)
    with OperatorProber() as prober:
        prober.start()
    assert (written[1]["device"], written[1]["backends"]) == ("cpu", {})


def test_what_makes_an_argument_is_part_of_the_key() -> None:
    """Reported in hpcaitech/ColossalAI#753, Hsword/Hetu#70, MIC-DKFZ/nnUNet#1152, MakazhanAlpamys/Soup#64."""
    made = Signature("aten.sin.default", (shape(100, origin=(0, 0)),), {})
    loose = Signature("aten.sin.default", (shape(100),), {})
    first = op_probe._keys([COS, made])
    second = op_probe._keys([COS, loose])
    assert first[0] == second[0] and first[1] != second[1]


@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_a_package_that_is_not_installed_is_found_by_the_process_too(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    def start(command: Any, *, env: dict[str, str], **settings: Any) -> Any:
        started.append(env)
        raise OSError("not started here")

    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    monkeypatch.setattr(op_probe.subprocess, "Popen", start)
    with pytest.raises(OSError, match="not started here"):
        OperatorProber().start()
    folders = started[0]["PYTHONPATH"].split(os.pathsep)
    assert folders == [*([] if before is None else [before]), str(Path(op_probe.__file__).parents[2])]
