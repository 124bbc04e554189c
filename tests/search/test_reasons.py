"""Why levers are set as they are, in words. Run: ``pytest tests/search/test_reasons.py``."""

from __future__ import annotations

import pytest

from lightning_memfit.plan import BatchSplit, Budget, Forecast, MemoryBreakdown, PlanRequest
from lightning_memfit.search.levers import search_space
from lightning_memfit.search.reasons import choices_of

RULED_OUT = "not recomputed: a module that was recomputed gave something else"
ITSELF = "the model itself recomputes 1 module (blocks.0)"


@pytest.mark.parametrize(
    ("asked", "blocks", "anyway", "ruled_out", "reason"),
    [
        ("auto", ("blocks.1", "blocks.2"), (), None, "fits without recomputing anything"),
        ("auto", ("blocks.1", "blocks.2"), ("blocks.0",), None, "fits without recomputing anything"),
        ("auto", ("blocks.1", "blocks.2"), (), RULED_OUT, RULED_OUT),
        ("auto", ("blocks.1", "blocks.2"), ("blocks.0",), RULED_OUT, f"{RULED_OUT}; {ITSELF}"),
        ("auto", (), ("blocks.0",), None, ITSELF),
        ("auto", (), (), None, "no repeated blocks found"),
        ("none", ("blocks.1", "blocks.2"), (), None, "as given"),
        ("none", (), ("blocks.0",), None, f"as given; {ITSELF}"),
    ],
)
def test_why_nothing_is_recomputed(
    asked: str, blocks: tuple[str, ...], anyway: tuple[str, ...], ruled_out: str | None, reason: str
) -> None:
    request = PlanRequest(activation_checkpointing=asked)
    whole = BatchSplit(effective_batch_size=4, loader_batch_size=4, slice_sizes=(4,))
    space = search_space(request, whole, blocks=blocks, recomputed_anyway=anyway)
    if ruled_out is not None:
        space = space.without_recomputation(ruled_out)
    chosen = Forecast(
        candidate=space.candidate(next(space.settings(0)), 1, zero_gradients_early=False),
        memory=MemoryBreakdown(peak_allocated_bytes=1, by_category={}, peak_phase=None, num_parameters=1),
    )
    budget = Budget(budget_bytes=2, capacity_bytes=2, headroom_bytes=0, non_torch_bytes=0, reason="as given")
    choices = {choice.lever: choice for choice in choices_of(request, budget, space, chosen, ())}
    assert (choices["activation_checkpointing"].value, choices["activation_checkpointing"].reason) == ("none", reason)
