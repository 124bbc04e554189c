"""How samples become curves, on a clock that is told what to say; and that samples call what they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_memfit.hardware.rate_samples import Call, Halves, Sample, quantised_samples, samples
from lightning_memfit.hardware.sampled_curves import _Table, sampled_curves, seconds_of


class Machine:
    """A clock, and calls that take the time they are told to take."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def add(self, seconds: Callable[[int], float]) -> Callable[[Halves, int, torch.dtype], Call]:
        def make(halves: Halves, size: int, dtype: torch.dtype) -> Call:
            a, b = halves.of(size, dtype=dtype), halves.of(size, dtype=dtype)

            def call() -> torch.Tensor:
                self.now += seconds(size)
                return torch.add(a, b)

            return call

        return make

    def sample(self, seconds: Callable[[int], float], *sizes: int) -> Sample:
        return Sample(kind="elementwise", sizes=sizes, make=self.add(seconds), dtypes=(torch.float32,))


@pytest.fixture(scope="module")
def halves() -> Halves:
    return Halves()


def test_the_time_of_several_calls_is_shared_among_them() -> None:
    machine = Machine()

    def call() -> None:
        machine.now += 3.0

    assert seconds_of(call, 4, machine.clock) == 3.0


def test_a_curve_has_the_bytes_of_each_call_and_its_seconds(halves: Halves) -> None:
    machine = Machine()
    found = sampled_curves(halves, [machine.sample(lambda size: size * 1e-9, 100, 1000)], machine.clock)
    curve = found.curves["elementwise"]["float32"]
    # Two arguments and a result of 4 bytes an element.
    assert curve.work == (1200, 12000)
    assert curve.seconds == pytest.approx((1e-7, 1e-6))
    assert found.noise == pytest.approx(0.0)
    assert found.unmeasured == ()


def test_the_fastest_round_counts_and_the_distance_of_the_second_is_noise(halves: Halves) -> None:
    machine = Machine()
    # Counted once, timed once to see how long it takes, then once in each of four rounds.
    times = iter([9e-3, 1e-3, 1.3e-3, 1e-3, 1.2e-3, 5e-3])
    found = sampled_curves(halves, [machine.sample(lambda size: next(times), 100)], machine.clock)
    assert found.curves["elementwise"]["float32"].seconds == pytest.approx((1e-3,))
    assert found.noise == pytest.approx(0.2)


def test_a_small_call_that_is_held_up_in_every_round_neither_ends_the_sizes_nor_the_measuring(halves: Halves) -> None:
    machine = Machine()
    # 3 ms are above the limit of 1.5 ms for a larger size to follow, but not where fewer than three sizes are there.
    sample = machine.sample(lambda size: 3e-3 if size == 64 else 3e-4, 64, 128, 256, 512)
    found = sampled_curves(halves, [sample], machine.clock)
    # 12 bytes an element; the time of the first is above what a call so small can take.
    assert found.curves["elementwise"]["float32"].work == (12 * 128, 12 * 256, 12 * 512)
    assert found.noise == pytest.approx(0.0)
    assert found.held_up == 1 / 4


def test_sizes_end_where_a_call_takes_too_long(halves: Halves) -> None:
    machine = Machine()
    # 1, 2, 3 and 4 ms: three sizes are wanted at least, and the third is above the limit of 1.5 ms.
    found = sampled_curves(halves, [machine.sample(lambda size: size * 1e-5, 100, 200, 300, 400)], machine.clock)
    assert found.curves["elementwise"]["float32"].work == (1200, 2400, 3600)
    # 10 ms is more than three times the limit: no second size.
    found = sampled_curves(halves, [machine.sample(lambda size: size * 1e-4, 100, 200)], machine.clock)
    assert found.curves["elementwise"]["float32"].work == (1200,)


def test_rounds_end_when_they_take_too_long(halves: Halves) -> None:
    machine = Machine()
    calls = []

    def seconds(size: int) -> float:
        calls.append(size)
        return 0.7

    # Three calls in the first round and one in the second: 2.8 s are more than the 2 s after which none begins.
    sampled_curves(halves, [machine.sample(seconds, 100)], machine.clock)
    assert len(calls) == 4


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, LookupError, NotImplementedError])
def test_an_operator_that_this_build_lacks_is_named_and_the_others_are_measured(
    halves: Halves, error: type[Exception]
) -> None:
    def missing(halves: Halves, size: int, dtype: torch.dtype) -> Call:
        raise error("not implemented for 'Half'\nand more")

    machine = Machine()
    lacking = Sample(kind="convolution", sizes=(1, 2), make=missing)
    found = sampled_curves(halves, [lacking, machine.sample(lambda size: 1e-6, 100)], machine.clock)
    assert set(found.curves) == {"elementwise"}
    assert found.unmeasured == (
        "convolution float32: not implemented for 'Half'",
        "convolution bfloat16: not implemented for 'Half'",
    )


def test_a_sample_that_calls_something_else_is_named(halves: Halves) -> None:
    other = Sample(kind="matmul", sizes=(64,), make=Machine().add(lambda size: 1e-6), dtypes=(torch.float32,))
    found = sampled_curves(halves, [other], Machine().clock)
    assert found.unmeasured == (
        f"matmul float32: no such operator was called: torch {torch.__version__} computes it otherwise",
    )


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.kind)
def test_torch_still_calls_the_operator_that_a_sample_stands_for(halves: Halves, sample: Sample) -> None:
    table = _Table(sample, torch.float32)
    call = sample.make(halves, sample.sizes[0], torch.float32)
    point = table._counted(call)  # raises where torch calls another one: hardware/rate_samples.py must be changed
    assert point.work > 0
    assert point.moved_bytes > 0


@pytest.mark.parametrize("index", [0, 1])
def test_bitsandbytes_still_has_the_operators_of_its_steps(halves: Halves, index: int) -> None:
    pytest.importorskip("bitsandbytes")
    sample = quantised_samples()[index]
    point = _Table(sample, torch.float32)._counted(sample.make(halves, 4096, torch.float32))
    # Parameter and gradient in 4 bytes, two states in 1 or 4; codes and scales on top of those in 1.
    least = 4096 * (4 + 4 + 2 * (1, 4)[index])
    assert least <= point.work < 1.2 * least


def test_tensors_of_halves_do_not_overlap_and_hold_no_denormal_numbers(halves: Halves) -> None:
    some = [halves.of(1000, dtype=torch.float32) for _ in range(4)]
    starts = sorted(tensor.data_ptr() for tensor in some)
    assert all(after - before >= 4000 for before, after in itertools.pairwise(starts))
    # At the same place of a page they would push each other out of the caches.
    assert len({start % 4096 for start in starts}) == 4
    assert set(halves.of(1000, dtype=torch.bfloat16).tolist()) <= {0.0, 0.5}


def test_what_a_sample_runs_on_is_never_written(halves: Halves) -> None:
    for sample in samples():
        for dtype in sample.dtypes:
            call: Any = sample.make(halves, sample.sizes[0], dtype)
            with torch.no_grad():
                call()
    assert all(bool((halves.of(2**22, dtype=torch.float32) == 0.5).all()) for _ in range(4))


class SometimesHeldUp:
    """A clock of calls that take 50 us, but 20 ms in the first rounds of the first size."""

    def __init__(self, rounds: int) -> None:
        self.now, self.held_up, self.calls = 0.0, rounds, 0

    def make(self, halves: Any, size: int, dtype: torch.dtype) -> Any:
        ones = torch.ones(size)

        def call() -> Any:
            if size == SIZES[0]:
                self.calls += 1
            # Counted once before it is timed, and twice in the first round: how long a call takes is asked first.
            held_up = size == SIZES[0] and self.calls <= 2 + self.held_up
            self.now += 2e-2 if held_up else 5e-5
            return torch.add(ones, ones)

        return call


SIZES = (64, 4096, 65536, 262144)


@pytest.mark.parametrize(
    ("rounds", "sizes", "held_up"), [(0, 4, 0.0), (1, 4, 0.0), (3, 4, 0.0), (6, 4, 0.0), (99, 1, 5.0)]
)
def test_a_size_that_is_held_up_in_some_rounds_keeps_no_larger_one_from_the_others(
    rounds: int, sizes: int, held_up: float
) -> None:
    clock = SometimesHeldUp(rounds)
    sample = Sample(kind="elementwise", sizes=SIZES, make=clock.make, dtypes=(torch.float32,))
    found = sampled_curves(Halves(), [sample], lambda: clock.now)
    assert len(found.curves["elementwise"]["float32"].work) == sizes
    assert found.held_up == held_up
