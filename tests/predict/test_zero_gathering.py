"""Which parameters stage 3 holds whole: four of 100 elements of 2 bytes, each its module's own, two ranks."""

from __future__ import annotations

from typing import Any

from lightning_memfit.predict.step_writer import StepWriter
from lightning_memfit.predict.zero_gathering import GatheredParameters
from lightning_memfit.predict.zero_layout import ZeroSettings
from lightning_memfit.trace.timeline import Operation, Timeline

ONE = 200
"""Bytes of a parameter."""
MODULES = [(name, (index,)) for index, name in enumerate("abcd")]
VISITS = [*MODULES, *reversed(MODULES)]
NOTHING = Timeline(
    residents=(),
    events=(),
    categories={},
    signatures=(),
    num_parameters=0,
    num_operations=0,
    flops=0,
    recomputed_flops=0,
)


class Whole:
    """Follows what is allocated; parameters that are whole hold 200 bytes each."""

    def __init__(self, **settings: Any) -> None:
        self.writer = StepWriter(NOTHING)
        defaults = {"prefetch_elements": 0, "persistent_elements": 0}
        self.gathered = GatheredParameters(
            self.writer,
            ZeroSettings(stage=3, ranks=2, bucket_elements=1, buckets=1, overlaps=True, **{**defaults, **settings}),
            elements=dict.fromkeys(range(4), 100),
            element_bytes=dict.fromkeys(range(4), 2),
            gloo=False,
        )
        self.gathered.begin(VISITS)

    @property
    def bytes(self) -> int:
        residents, events = self.writer.parts("both")
        live = {each.storage: each.allocated_bytes for each in residents}
        for event in events:
            if isinstance(event, Operation):
                live.update((output.storage, output.allocated_bytes) for output in event.outputs)
            else:
                del live[event.storage]
        return sum(live.values())

    def walk(self) -> list[int]:
        """Bytes while each module is visited, forward and backward."""
        found = []
        for module, own in VISITS:
            self.gathered.fetch(module, own)
            found.append(self.bytes)
            self.gathered.release(module, own)
        return found


def test_what_is_used_again_soon_is_kept_for_the_backward() -> None:
    # forward: one more with each module; backward: one less after each
    assert Whole().walk() == [ONE, 2 * ONE, 3 * ONE, 4 * ONE, 4 * ONE, 3 * ONE, 2 * ONE, ONE]


def test_what_is_used_too_late_is_let_go_and_fetched_again() -> None:
    # within 0 elements nothing is used again: one at a time
    assert Whole(reuse_elements=0).walk() == [ONE] * 8
    # within 250 elements are the next three modules: c is met again behind d and d, b behind two more
    assert Whole(reuse_elements=250).walk() == [ONE, ONE, ONE, 2 * ONE, 2 * ONE, ONE, ONE, ONE]


def test_looking_ahead_fetches_as_many_as_fit() -> None:
    whole = Whole(prefetch_elements=150)
    whole.gathered.fetch(*MODULES[0])
    # a, and flat what comes until 150 elements are reached: b and c
    assert whole.bytes == ONE + 2 * ONE
    whole.gathered.release(*MODULES[0])
    whole.gathered.fetch(*MODULES[1])
    # b and c taken apart, their flat tensor stays until c is asked for; and d ahead
    assert whole.bytes == ONE + 2 * ONE + 2 * ONE + ONE
    whole.gathered.release(*MODULES[1])
    whole.gathered.fetch(*MODULES[2])
    assert whole.bytes == 4 * ONE


def test_nothing_is_fetched_ahead_beyond_the_limit_of_what_is_whole() -> None:
    whole = Whole(prefetch_elements=1000, live_elements=200)
    whole.gathered.fetch(*MODULES[0])
    assert whole.bytes == 2 * ONE


def test_small_parameters_are_whole_but_within_the_step() -> None:
    whole = Whole(persistent_elements=100)
    assert whole.walk() == [4 * ONE] * 8
    whole.gathered.release_all()
    assert whole.bytes == 0
    whole.gathered.gather_persistent()
    assert whole.bytes == 4 * ONE


def test_two_modules_that_share_a_parameter_keep_it_until_both_are_left() -> None:
    whole = Whole(reuse_elements=0)
    whole.gathered.begin([("a", (0,)), ("a.inner", (0,))])
    whole.gathered.fetch("a", (0,))
    whole.gathered.fetch("a.inner", (0,))
    whole.gathered.release("a.inner", (0,))
    assert whole.bytes == ONE
    whole.gathered.release("a", (0,))
    assert whole.bytes == 0
