"""What a step consists of, and how Lightning calls it. Run: ``pytest tests/trace/test_step_program.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_memfit.trace.step_program import program_of, takes_batch_idx


def batch_only(self: Any, batch: Any) -> None: ...
def with_index(self: Any, batch: Any, batch_idx: int) -> None: ...
def with_other_name(self: Any, batch: Any, number: int = 0) -> None: ...
def everything(self: Any, *args: Any) -> None: ...
def named_only(self: Any, batch: Any, *, note: str = "") -> None: ...
def more_names(self: Any, batch: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("step", [batch_only, with_index, with_other_name, everything, named_only, more_names])
def test_the_index_is_given_where_lightning_gives_it(step: Callable[..., Any]) -> None:
    bound = step.__get__(object())
    assert takes_batch_idx(bound) is is_param_in_hook_signature(bound, "batch_idx", min_args=2)


def test_a_step_that_takes_any_arguments_gets_batch_and_index() -> None:
    class AnyArguments(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, *args: Any) -> Tensor:
            batch, index = args
            loss: Tensor = self.layer(batch).sum() + index
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert program_of(AnyArguments()).compute_loss(torch.ones(3, 2)).shape == ()
