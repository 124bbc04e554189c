"""Settings as users write them become one checked request."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lightning_memfit import MemFit
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan import PlanRequest
from lightning_memfit.settings import check_no_fit_value, plan_request
from lightning_memfit.units import GIB


def test_what_is_left_out_asks_for_nothing() -> None:
    assert plan_request() == PlanRequest()


def test_every_setting_has_the_name_and_the_default_that_memfit_has() -> None:
    ours = inspect.signature(plan_request).parameters
    theirs = inspect.signature(MemFit.__init__).parameters
    assert {name: each.default for name, each in ours.items()} == {name: theirs[name].default for name in ours}


def test_sizes_words_and_patterns_are_converted() -> None:
    request = plan_request(budget="2GiB", headroom="0", micro_batch_size="auto", activation_checkpointing="blocks.*")
    assert (request.budget, request.headroom, request.micro_batch_size) == (2 * GIB, 0, None)
    assert request.activation_checkpointing == ("blocks.*",)
    assert plan_request(headroom=0).headroom == 0
    assert plan_request(activation_checkpointing=["a", "b"]).activation_checkpointing == ("a", "b")
    assert plan_request(loss_weight=len).loss_weight == "len"


@pytest.mark.parametrize("headroom", [False, -1, "none"])
def test_a_headroom_that_is_no_size_is_refused(headroom: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^headroom="):
        plan_request(headroom=headroom)


@pytest.mark.parametrize("value", [0, -2.5, float("inf")])
def test_a_value_for_the_objective_is_any_number(value: float) -> None:
    check_no_fit_value("value", value)


@pytest.mark.parametrize(
    ("on_no_fit", "value", "words"),
    [
        ("value", None, "on_no_fit='value' needs no_fit_value=: "),
        ("value", float("nan"), "no_fit_value=nan must be a number, or be left out."),
        ("value", "1e9", "no_fit_value='1e9' must be a number, or be left out."),
        ("skip", 1.0, "no_fit_value=1.0 is the objective of a run that does not fit under on_no_fit='value', and "),
    ],
)
def test_a_value_that_would_not_be_used_is_refused(on_no_fit: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_no_fit_value(on_no_fit, value)
    assert str(caught.value).startswith(words)
