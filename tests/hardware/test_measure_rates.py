"""What is measured, what is left as it was, and the cache. Times themselves are never asserted."""

from __future__ import annotations

import gc
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memfit.hardware import measure_rates as module
from lightning_memfit.hardware.measure_rates import MOST_NOISE, forget_rates, measure_rates
from lightning_memfit.hardware.rate_samples import Call, Halves, Sample, samples
from lightning_memfit.hardware.rates import AllocatorRates, CallSeconds, DeviceRates, RateCurve
from lightning_memfit.hardware.sampled_curves import SampledCurves


def add(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a, b = halves.of(size, dtype=dtype), halves.of(size, dtype=dtype)
    return lambda: torch.add(a, b)


def product(halves: Halves, size: int, dtype: torch.dtype) -> Call:
    a, b = halves.of(size, size, dtype=dtype), halves.of(size, size, dtype=dtype)
    return lambda: torch.mm(a, b)


FEW = (
    Sample(kind="elementwise", sizes=(64, 4096), make=add, dtypes=(torch.float32,)),
    Sample(kind="matmul", sizes=(8, 16), make=product, dtypes=(torch.float32,)),
)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of operators: the others are measured in the same way."""
    monkeypatch.setattr(module, "samples", lambda: FEW)


class Measurements(list[DeviceRates]):
    """Stands in for measuring: every time something else comes out."""

    def __call__(self, clock: Any) -> DeviceRates:
        curve = {"float32": RateCurve(work=(1.0,), seconds=(1.0 + len(self),))}
        found = DeviceRates(
            device="a processor",
            threads=torch.get_num_threads(),
            torch_version="any",
            curves={"elementwise": curve, "matmul": curve},
            calls=CallSeconds(**dict.fromkeys((field.name for field in fields(CallSeconds)), 1e-6)),
            allocator=AllocatorRates(seconds_per_new_byte=0.0, largest_kept_block_bytes=None),
            noise=0.0,
        )
        self.append(found)
        return found


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    """What was measured; nothing is measured really."""
    measurements = Measurements()
    monkeypatch.setattr(module, "_measured", measurements)
    return measurements


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole() -> DeviceRates:
    """The real thing, once; it takes a second on a quiet machine. Nothing in it may draw from the global generator."""
    before = torch.get_rng_state()
    found = measure_rates(cache_dir=None, quantised=False)
    assert torch.equal(torch.get_rng_state(), before)
    return found


@pytest.fixture(autouse=True)
def busy_machines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is kept, however much other processes disturb it."""
    monkeypatch.setattr("lightning_memfit.hardware.measure_rates.MOST_NOISE", math.inf)


@pytest.mark.usefixtures("few_samples")
def test_rates_of_a_busy_machine_are_used_but_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_memfit.hardware.measure_rates.MOST_NOISE", -1.0)
    assert measure_rates(cache_dir=tmp_path, quantised=False).curves
    assert list(tmp_path.glob("rates-*.json")) == []


def test_every_kind_is_measured_in_both_dtypes_or_named_with_the_reason(whole: DeviceRates) -> None:
    wanted = {f"{sample.kind} {str(dtype).removeprefix('torch.')}" for sample in samples() for dtype in sample.dtypes}
    measured = {f"{kind} {dtype}" for kind, by_dtype in whole.curves.items() for dtype in by_dtype}
    missing = {reason.partition(":")[0] for reason in whole.unmeasured}
    assert measured | missing == wanted
    assert "elementwise float32" in measured
    if whole.noise <= MOST_NOISE:  # else other processes held calls up, and what they spoilt is left out
        assert {"matmul float32", "matmul bfloat16"} <= measured
        # At least two sizes, so that there is a line between them.
        assert all(len(curve.work) >= 2 for by_dtype in whole.curves.values() for curve in by_dtype.values())


def test_rates_say_what_they_are_of(whole: DeviceRates) -> None:
    assert (whole.threads, whole.torch_version) == (torch.get_num_threads(), torch.__version__)
    assert whole.device
    for name in ("forward", "backward", "optimizer_step", "foreach_tensor", "fused_tensor", "recomputed_block"):
        seconds = getattr(whole.calls, name)
        assert math.isfinite(seconds) and seconds >= 0
    assert whole.allocator.seconds_per_new_byte >= 0
    assert whole.noise >= 0


@pytest.mark.usefixtures("few_samples")
def test_measuring_leaves_the_process_as_it_was() -> None:
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        measure_rates(cache_dir=None, quantised=False)
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert gc.isenabled()


@pytest.mark.usefixtures("few_samples")
def test_a_default_dtype_of_the_user_neither_counts_nor_changes() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = measure_rates(cache_dir=None, quantised=False)
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(before)
    assert set(found.curves["elementwise"]) == {"float32"}


def test_what_interrupts_measuring_leaves_the_switches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        assert not gc.isenabled()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_measured", fail)
    with pytest.raises(KeyboardInterrupt):
        measure_rates(cache_dir=None, quantised=False)
    assert gc.isenabled()
    assert torch.get_default_dtype() is torch.float32


def test_the_second_call_reads_what_the_first_measured(tmp_path: Path, measurements: Measurements) -> None:
    first = measure_rates(cache_dir=tmp_path / "new", quantised=False)
    assert measure_rates(cache_dir=tmp_path / "new", quantised=False) == first
    assert measurements == [first]
    (file,) = (tmp_path / "new").glob("*.json")
    assert DeviceRates.from_dict(json.loads(file.read_text())) == first
    assert not list((tmp_path / "new").glob("*.tmp"))


def test_without_a_directory_everything_is_measured_anew(measurements: Measurements) -> None:
    assert measure_rates(cache_dir=None, quantised=False) != measure_rates(cache_dir=None, quantised=False)
    assert len(measurements) == 2


@pytest.mark.usefixtures("threads")
def test_another_number_of_threads_is_measured_anew(tmp_path: Path, measurements: Measurements) -> None:
    """Reported in hpcaitech/ColossalAI#753, Hsword/Hetu#70, MIC-DKFZ/nnUNet#1152, MakazhanAlpamys/Soup#64."""
    for number in (1, 2, 1):
        torch.set_num_threads(number)
        assert measure_rates(cache_dir=tmp_path, quantised=False).threads == number
    assert len(measurements) == len(list(tmp_path.glob("*.json"))) == 2


def test_settings_of_the_allocator_are_measured_anew(
    tmp_path: Path, measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_rates(cache_dir=tmp_path, quantised=False)
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1000000")
    measure_rates(cache_dir=tmp_path, quantised=False)
    assert len(measurements) == 2


def test_products_in_another_precision_are_measured_anew(tmp_path: Path, measurements: Measurements) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            measure_rates(cache_dir=tmp_path, quantised=False)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(measurements) == 2


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"version": 0}', b"\xff\xfe", b"", b'{"version": 1, "curves": {}}'])
def test_a_damaged_cache_is_measured_anew_and_replaced(
    tmp_path: Path, measurements: Measurements, content: bytes
) -> None:
    measure_rates(cache_dir=tmp_path, quantised=False)
    (file,) = tmp_path.glob("*.json")
    file.write_bytes(content)
    found = measure_rates(cache_dir=tmp_path, quantised=False)
    assert found == measurements[1]
    assert DeviceRates.from_dict(json.loads(file.read_text())) == found


def test_the_steps_of_bitsandbytes_are_added_to_rates_that_lack_them(
    tmp_path: Path, measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = measure_rates(cache_dir=tmp_path, quantised=False)
    steps = {"quantised_optimizer": {"float32": RateCurve(work=(1.0,), seconds=(3.0,))}}
    found = SampledCurves(curves=steps, noise=0.5, unmeasured=("unquantised_optimizer float32: gone",))
    monkeypatch.setattr(module, "sampled_curves", lambda halves, chosen, clock: found)
    extended = measure_rates(cache_dir=tmp_path, quantised=True)
    assert extended == replace(
        plain, curves={**plain.curves, **steps}, noise=0.5, unmeasured=("unquantised_optimizer float32: gone",)
    )
    # The file has them from now on, and nothing was measured twice.
    assert measure_rates(cache_dir=tmp_path, quantised=False) == extended
    assert measure_rates(cache_dir=tmp_path, quantised=True) == extended
    assert len(measurements) == 1


@pytest.mark.parametrize(("noise", "held_up"), [(0.5, 0.0), (0.25, 0.25)])
def test_disturbance_of_the_steps_of_bitsandbytes_counts(
    measurements: Measurements, monkeypatch: pytest.MonkeyPatch, noise: float, held_up: float
) -> None:
    steps = {"quantised_optimizer": {"float32": RateCurve(work=(1.0,), seconds=(3.0,))}}
    found = SampledCurves(curves=steps, noise=noise, unmeasured=(), held_up=held_up)
    monkeypatch.setattr(module, "sampled_curves", lambda halves, chosen, clock: found)
    assert measure_rates(cache_dir=None, quantised=True).noise == 0.5


def test_steps_of_bitsandbytes_that_cannot_be_measured_are_not_tried_at_every_start(
    tmp_path: Path, measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fails(halves: Halves, chosen: Any, clock: Any) -> SampledCurves:
        tried.append(chosen)
        return SampledCurves(curves={}, noise=0.0, unmeasured=("quantised_optimizer float32: no such operator",))

    monkeypatch.setattr(module, "sampled_curves", fails)
    first = measure_rates(cache_dir=tmp_path, quantised=True)
    assert measure_rates(cache_dir=tmp_path, quantised=True) == first
    assert len(tried) == 1
    assert first.unmeasured == ("quantised_optimizer float32: no such operator",)


def test_a_cache_that_cannot_be_written_costs_measuring_and_nothing_else(
    tmp_path: Path, measurements: Measurements
) -> None:
    (tmp_path / "file").touch()
    assert measure_rates(cache_dir=tmp_path / "file" / "cache", quantised=False) == measurements[0]


def test_bitsandbytes_is_measured_by_default_only_where_it_is_imported_already(
    measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DeviceRates] = []
    monkeypatch.setattr(module, "_with_quantised", lambda known, clock: asked.append(known) or known)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    measure_rates(cache_dir=None)
    assert not asked
    monkeypatch.setitem(sys.modules, "bitsandbytes", sys)
    measure_rates(cache_dir=None)
    assert asked == measurements[1:]


def test_torch_still_has_the_private_name_that_the_key_uses() -> None:
    assert hasattr(torch._C, "_has_mkldnn"), f"torch {torch.__version__}: hardware/measure_rates.py must be changed"


def test_rates_that_were_disproved_are_measured_anew(tmp_path: Path, measurements: Measurements) -> None:
    measure_rates(cache_dir=tmp_path, quantised=False)
    forget_rates(tmp_path)
    measure_rates(cache_dir=tmp_path, quantised=False)
    assert len(measurements) == 2
    forget_rates(tmp_path / "never made")
