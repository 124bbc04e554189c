"""The loss by which routers balance their experts: it couples the samples of a batch, and is too small to show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

_ROUTER_FACTOR = "router_aux_loss_coef"


class RouterLosses:
    """Sees, while it is entered, whether a model of transformers adds the loss by which routers balance their experts.

    It is a product of two means over all tokens of the batch, so that it couples them; beside the loss it is so small
    that no comparison of losses shows it, while the router's gradients do change.
    Source: ``load_balancing_loss_func`` of transformers 5, ``models/mixtral/modeling_mixtral.py``; arXiv:2101.03961,
    equations 4 to 6. Recognised by what the model returns: ``router_logits`` and ``aux_loss``, also of an encoder.
    """

    def __init__(self) -> None:
        self.found: str | None = None
        """What was seen, in words; ``None`` if nothing was."""
        self._unused: dict[int, torch.Tensor] = {}
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Self:
        self._handle = register_module_forward_hook(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # Inner modules return first: what is around a model and hands its output on says nothing new.
        if self.found is not None or not isinstance(output, Mapping):
            return
        losses = {str(name): value for name, value in output.items() if isinstance(value, torch.Tensor)}
        losses = {
            name: loss for name, loss in losses.items() if name.endswith("aux_loss") and id(loss) not in self._unused
        }
        if not losses or not any(str(name).endswith("router_logits") for name in output):
            return
        factor = getattr(module, _ROUTER_FACTOR, None)
        if factor == 0:
            self._unused.update({id(loss): loss for loss in losses.values()})  # held, so that no other has its id
            return
        shown = "" if factor is None else f", {_ROUTER_FACTOR}={factor:g}"
        self.found = (
            f"{type(module).__name__} adds its router's auxiliary loss ({min(losses)}{shown}), which balances the "
            "experts over all tokens of the batch, so that slices would change it"
        )
