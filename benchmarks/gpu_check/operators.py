"""What operators take inside, call by call, held to the formulas; which attention kernel runs; what cuBLAS keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.gpu_check.cases import Case, adamw, workload_of
from benchmarks.gpu_check.gauges import Gauge
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.plan import BatchSplit, Candidate
from lightning_memfit.predict.allocator_settings import AllocatorSettings
from lightning_memfit.predict.cuda_temporaries import CudaArchitecture, hidden_bytes, library_workspaces
from lightning_memfit.probers import GpuProber, gpu_prober
from lightning_memfit.targets import CudaTarget, FormulaProber, target_of
from lightning_memfit.trace.cuda_attention import AttentionCall, chosen_backend
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.timeline import Signature, TensorShape
from lightning_memfit.trace.training_step import program_of

_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Source: ``SDPBackend`` of ``aten/src/ATen/native/transformers/sdp_utils_cpp.h``."""


class HiddenBytesSeen(TorchDispatchMode):
    """Measures every operator within it: most bytes alive in the call beyond those before it and its new outputs.

    The backward of a graph is seen too, since the engine's threads take the mode over.
    """

    def __init__(self, gauge: Gauge, architecture: CudaArchitecture) -> None:
        super().__init__()
        self._gauge, self._architecture = gauge, architecture
        self.rows: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before_storages = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        signature = Signature(str(func), _described(args), _described(kwargs))
        self._gauge.reset()
        before = self._gauge.live_bytes
        out = func(*args, **kwargs)
        peak = self._gauge.peak_bytes - before
        made: dict[int, int] = {}
        for each in _tensors(out):
            storage = each.untyped_storage()
            if storage._cdata not in before_storages and each.device.type == self._gauge.device.type:
                made[storage._cdata] = storage.nbytes()
        rounding = AllocatorSettings().rounded_bytes if self._gauge.device.type == "cuda" else int
        self._add(signature, max(0, peak - sum(map(rounding, made.values()))))
        return out

    def _add(self, signature: Signature, seen: int) -> None:
        formula = hidden_bytes(signature, self._architecture)
        key = repr(signature)
        if not seen and formula is None:
            return
        row = self.rows.setdefault(key, {"op": signature.op, "call": key[:400], "calls": 0, "measured_hidden_bytes": 0})
        row["calls"] += 1
        row["measured_hidden_bytes"] = max(row["measured_hidden_bytes"], seen)
        if formula is not None:
            row |= {"predicted_low_bytes": formula.low_bytes, "predicted_high_bytes": formula.high_bytes}
            row["within"] = formula.low_bytes <= row["measured_hidden_bytes"] <= formula.high_bytes


def hidden_temporaries(
    gauge: Gauge, architecture: CudaArchitecture, programs: dict[str, Callable[[torch.device], None]]
) -> Iterator[dict[str, Any]]:
    """Every distinct operator call of some programs that hides bytes, or should by a formula."""
    for name, program in programs.items():
        gauge.clean()
        program(gauge.device)  # once before: what libraries keep belongs to no call
        seen = HiddenBytesSeen(gauge, architecture)
        with seen:
            program(gauge.device)
        gauge.synchronize()
        yield from ({"program": name, **row} for row in seen.rows.values())


def programs(full: bool) -> dict[str, Callable[[torch.device], None]]:
    """The calls of interest, on a GPU in the sizes of real models."""
    rows, width = (8192, 768) if full else (64, 8)
    half = torch.bfloat16

    def sums(device: torch.device) -> None:
        for dtype in (torch.float32, half):
            torch.ones(rows, width, device=device, dtype=dtype).sum(0)

    def attention(device: torch.device) -> None:
        batch, heads, length, head = (8, 12, 1024, 64) if full else (1, 2, 16, 8)
        for dtype in (half, torch.float32):
            inputs = [
                torch.randn(batch, heads, length, head, device=device, dtype=dtype, requires_grad=True)
                for _ in range(3)
            ]
            F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True).sum().backward()

    def embedding(device: torch.device) -> None:
        vocabulary = 50257 if full else 64
        weight = torch.randn(vocabulary, width, device=device, requires_grad=True)
        F.embedding(torch.randint(vocabulary, (rows,), device=device), weight).sum().backward()

    def indexing(device: torch.device) -> None:
        target = torch.zeros(rows, width, device=device)
        places = torch.randint(rows, (rows // 2,), device=device)
        target.index_put_((places,), torch.ones(rows // 2, width, device=device), accumulate=True)
        target.index_put_((places,), torch.ones(rows // 2, width, device=device))

    def norms(device: torch.device) -> None:
        torch._foreach_norm([torch.ones(rows * (i + 1), device=device) for i in range(8)])
        torch.linalg.vector_norm(torch.ones(rows * width, device=device))
        for dtype in (torch.float32, half):
            x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
            weight, bias = (torch.ones(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
            F.layer_norm(x, (width,), weight, bias).sum().backward()

    def convolutions(device: torch.device) -> None:
        side, channels = (56, 64) if full else (8, 4)
        for dtype in (torch.float32, half):
            x = torch.randn(32 if full else 2, channels, side, side, device=device, dtype=dtype, requires_grad=True)
            for kernel, groups in ((3, 1), (1, 1), (3, channels)):
                shape = (channels, channels // groups, kernel, kernel)
                weight = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
                F.conv2d(x, weight, padding=kernel // 2, groups=groups).sum().backward()

    def losses(device: torch.device) -> None:
        logits = torch.randn(rows // 4, 32000 if full else 32, device=device, requires_grad=True)
        F.cross_entropy(logits, torch.zeros(rows // 4, dtype=torch.long, device=device)).backward()

    def recurrent(device: torch.device) -> None:
        layers = torch.nn.LSTM(width, width, 2, batch_first=True).to(device)
        layers(torch.randn(16, 64 if full else 4, width, device=device))[0].sum().backward()

    def sorting(device: torch.device) -> None:
        x = torch.randn(rows, width, device=device)
        x.topk(4), x.sort(), x.cumsum(0), x.flatten().sort()

    every = (sums, attention, embedding, indexing, norms, convolutions, losses, recurrent, sorting)
    return {program.__name__: program for program in every}


def probed_calls(case: Case, device: str, architecture: CudaArchitecture) -> Iterator[dict[str, Any]]:
    """Every distinct call of a case's traced step, run once in a process of its own, held to the formulas."""
    signatures, spec = _signatures_of(case, device, architecture), detect_device(device)
    with OperatorProber(device=device, uuid=spec.uuid) as prober:
        probes = prober.probe(signatures)
    for number, signature in enumerate(signatures):
        formula, result = hidden_bytes(signature, architecture), probes.results.get(number)
        seen = None if result is None else result.temporary_bytes
        if not seen and (formula is None or not formula.high_bytes):
            continue
        row: dict[str, Any] = {"label": case.label, "op": signature.op, "call": repr(signature)[:400]}
        row |= {"measured_hidden_bytes": seen, "failure": None if result else probes.failures.get(signature.op)}
        if formula is not None:
            row |= {"predicted_low_bytes": formula.low_bytes, "predicted_high_bytes": formula.high_bytes}
        yield row


def compared_by_operator(calls: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row for each operator of :func:`probed_calls`: how its real calls compare with the formulas.

    Forecasts without a GPU take a formula's lower end: ``missing_bytes`` is the most by which a real call was above it.
    """
    by_operator: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        by_operator.setdefault(call["op"], []).append(call)
    for op, rows in sorted(by_operator.items()):
        seen = [row for row in rows if row["measured_hidden_bytes"] is not None]
        bounded = [row for row in seen if "predicted_low_bytes" in row]
        above = [row["measured_hidden_bytes"] - row.get("predicted_low_bytes", 0) for row in seen]
        yield {
            "op": op,
            "calls": len(rows),
            "not_run": len(rows) - len(seen),
            "failures": sorted({row["failure"] for row in rows if row.get("failure")}),
            "without_formula": len(seen) - len(bounded),
            "below": sum(row["measured_hidden_bytes"] < row["predicted_low_bytes"] for row in bounded),
            "within": sum(_within(row) for row in bounded),
            "above": sum(row["measured_hidden_bytes"] > row["predicted_high_bytes"] for row in bounded),
            "missing_bytes": max(0, *above) if above else None,
        }


def _within(row: dict[str, Any]) -> bool:
    return bool(row["predicted_low_bytes"] <= row["measured_hidden_bytes"] <= row["predicted_high_bytes"])


def probing_process(case: Case, device: str, architecture: CudaArchitecture, free: Callable[[], int]) -> dict[str, Any]:
    """What the process that runs operators on a GPU holds of it, what stays when it ended, and how long it takes.

    Args:
        case: whose operators are run.
        device: the GPU.
        architecture: the GPU.
        free: bytes that the driver calls free on it.
    """
    spec, signatures = detect_device(device), _signatures_of(case, device, architecture)
    target = target_of(spec)
    before, begin = free(), time.monotonic()
    if isinstance(target, CudaTarget):
        prober = gpu_prober(spec, target, cache_dir=None)
        assert isinstance(prober, GpuProber), "the GPU is here"
    else:  # on a CPU the path is followed all the same, and the process holds nothing that is looked at
        prober = GpuProber(OperatorProber(), FormulaProber(architecture))
    found = prober.probe(signatures)
    seconds, during = time.monotonic() - begin, free()
    again = time.monotonic()
    prober.end_process()
    row = {
        "label": case.label,
        "calls": len(signatures),
        "answered": len(found.results),
        "remarks": found.remarks,
        "seconds": seconds,
        "seconds_to_end": time.monotonic() - again,
        "measured_held_bytes": before - during,
        "measured_kept_after_end_bytes": before - free(),
    }
    prober.close()
    return row


def _signatures_of(case: Case, device: str, architecture: CudaArchitecture) -> Sequence[Signature]:
    """The distinct operator calls of a case's traced step."""
    workload = workload_of(case)
    spec = detect_device(device)
    program = program_of(workload.network, loss=workload.loss, optimizer=adamw)
    forecaster = Forecaster(program, workload.batch, prober=FormulaProber(architecture), target=target_of(spec))
    samples = len(next(iter(workload.batch.values())))
    split = BatchSplit(effective_batch_size=samples, loader_batch_size=samples, slice_sizes=(samples,))
    return forecaster.timeline(Candidate(precision=case.precision, split=split)).signatures


def kept_workspaces(gauge: Gauge, architecture: CudaArchitecture) -> dict[str, Any]:
    """What products leave allocated in the thread that calls them, and in another: cuBLAS's handles are per thread."""
    gauge.clean()
    before = gauge.live_bytes
    _product(gauge.device)
    here = gauge.live_bytes - before
    other = threading.Thread(target=_product, args=(gauge.device,))
    other.start()
    other.join()
    there = gauge.live_bytes - before - here
    _backward_product(gauge.device)
    backward = gauge.live_bytes - before - here - there
    expected = library_workspaces([("aten.mm.default", "forward"), ("aten.mm.default", "backward")], architecture)
    return {
        "measured_forward_thread_bytes": here,
        "measured_other_thread_bytes": there,
        "measured_autograd_thread_bytes": backward,
        "predicted": [
            {"name": each.name, "low_bytes": each.low_bytes, "high_bytes": each.high_bytes} for each in expected
        ],
    }


def _product(device: torch.device) -> None:
    left = torch.ones(256, 256, device=device)
    left @ left
    F.linear(left, left, left[0])


def _backward_product(device: torch.device) -> None:
    weight = torch.ones(256, 256, device=device, requires_grad=True)
    (weight @ weight).sum().backward()


def attention_choices(device: torch.device, capability: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Which kernel torch chooses for calls of many kinds, and which one the emulation does."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    heads = (32, 64, 80, 128, 192, 256)
    for dtype, head, masked, dropout, causal, gradients in product(
        dtypes, heads, (False, True), (0.0, 0.1), (False, True), (False, True)
    ):
        if masked and causal:
            continue
        query, key, value = (
            torch.empty(2, 4, 64, head, device=device, dtype=dtype, requires_grad=gradients) for _ in range(3)
        )
        mask = torch.zeros(2, 1, 64, 64, device=device, dtype=dtype) if masked else None
        arguments = {"dropout_p": dropout, "is_causal": causal}
        real = _BACKENDS.get(torch._fused_sdp_choice(query, key, value, mask, **arguments), "unknown")
        call = AttentionCall(
            query=query, key=key, value=value, mask=mask, dropout=dropout, is_causal=causal, enable_gqa=False
        )
        emulated = chosen_backend(call, capability)
        yield {
            "dtype": str(dtype),
            "head": head,
            "masked": masked,
            "dropout": dropout,
            "causal": causal,
            "gradients": gradients,
            "measured": real,
            "predicted": emulated,
            "equal": real == emulated,
        }


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _described(tree: Any) -> Any:
    return tree_map_only(
        Tensor,
        lambda tensor: TensorShape(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()), None
        ),
        tree,
    )
