"""What the matrix does not ask of libraries' models: peaks where they recompute, gradients of adapters, metrics.

Run: ``pytest tests/zoo/test_libraries.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memfit import MemFit
from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.search.checkpointing import find_repeated_blocks
from tests.zoo import library_programs
from tests.zoo.library_programs import lora, lora_with_the_switch_on, whole_text
from tests.zoo.programs import PROGRAMS
from tests.zoo.test_matrix import pinned, planned, train

pytestmark = [pytest.mark.usefixtures("no_probing"), pytest.mark.filterwarnings("ignore:Found .* in eval mode")]

PEAK_WITHIN = 0.005
NAMES = [program.name for program in library_programs.PROGRAMS if program.name != "metrics as objects"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("asked", ["patterns", "blocks"])
def test_the_peak_of_a_model_that_recomputes_is_predicted(name: str, asked: str, tmp_path: Path) -> None:
    settings = pinned(PROGRAMS[name], "checkpointed")
    if asked == "blocks":
        settings["activation_checkpointing"] = "blocks"
    plugin = MemFit(verbose=False, **settings)
    train(PROGRAMS[name], tmp_path, plugin)
    plan, measured = planned(plugin), plugin.measured
    assert measured is not None
    assert plan.forecast.method == "traced"
    error = plan.forecast.memory.peak_allocated_bytes / measured.measured_peak_allocated_bytes - 1
    assert abs(error) <= PEAK_WITHIN


@pytest.mark.parametrize("name", NAMES)
def test_what_is_derived_is_what_is_traced(name: str, tmp_path: Path) -> None:
    """With all blocks, from the record of a step without recomputation, in which models have their caches."""
    plugin = MemFit(verbose=False, **{**pinned(PROGRAMS[name], "no-op"), "activation_checkpointing": "blocks"})
    train(PROGRAMS[name], tmp_path, plugin)
    assert not [note for note in planned(plugin).forecast.notes if "not derived" in note]


def gradients_of(model: Any) -> Mapping[str, torch.Tensor]:
    batch = {name: column[:4] for name, column in whole_text().items()}
    model(**batch).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_same_parameters_get_the_same_gradients_where_frozen_layers_are_recomputed() -> None:
    """Also below frozen embeddings, whose output requires no gradient."""

    def made(make: Any) -> Any:
        torch.manual_seed(0)
        return make()

    plain, recomputing, switched = made(lora), made(lora), made(lora_with_the_switch_on)
    names = find_repeated_blocks(recomputing)
    assert len(names) == 3
    checkpoint_modules(recomputing, names)
    checkpoint_modules(switched, names)
    expected = gradients_of(plain)
    assert all("lora_" in name for name in expected) and len(expected) == 3 * 2 * 2
    for model in (recomputing, switched):
        found = gradients_of(model)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-7) for name in expected)


def test_metrics_logged_as_objects_have_the_values_of_the_undivided_batch(tmp_path: Path) -> None:
    program = PROGRAMS["metrics as objects"]
    _, plain = train(program, tmp_path, None)
    plugin = MemFit(verbose=False, **pinned(program, "sliced"))
    _, sliced = train(program, tmp_path, plugin)
    assert planned(plugin).split.num_slices == 4
    values = {name: value.item() for name, value in plain.callback_metrics.items()}
    assert {name[:4] for name in values} == {"trai", "val_"} and len(values) == 4
    assert {name: value.item() for name, value in sliced.callback_metrics.items()} == pytest.approx(values, abs=1e-6)
