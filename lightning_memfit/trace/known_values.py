"""Values that a fake run does know: those of the batch's integers and flags, and of what is computed from them alone.

A model branches on them (is every token attended to? how many labels count?), and the branch decides what is allocated.
Adapter for private names of torch: ``torch.utils._mode_utils.no_dispatch``, ``FakeTensor.constant``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memfit.trace.tensors import tensors_in

LARGEST = 2**20
"""Elements above which a value is not followed: masks of (batch, heads, sequence, sequence) would cost real memory."""

_aten = torch.ops.aten
_FACTORIES = frozenset(
    {
        _aten.arange.default,
        _aten.arange.start,
        _aten.arange.start_step,
        _aten.full.default,
        _aten.ones.default,
        _aten.zeros.default,
    }
)


class KnownValues:
    """Real values of some of the fake tensors of a trace."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()

    def tell(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take the values of originals of which ``(original, fake)`` are given; floating-point ones are left out."""
        for original, fake in pairs:
            if _is_countable(original) and original.device.type == "cpu":
                self._values[fake] = original

    def scalar(self, fake: torch.Tensor) -> int | bool | None:
        """The number in a fake tensor of one element; ``None`` if it is not known."""
        value: torch.Tensor | None = self._values.get(fake)
        if value is None:
            return None
        with no_dispatch():
            number: int | bool = value.item()  # type: ignore[assignment]  # floating-point values are not followed
        return number

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operator ran on fakes: compute its values too, if those of all its arguments are known."""
        if func._schema.is_mutable:
            self._forget(tensors_in((args, kwargs)))
            return
        results = [out] if isinstance(out, torch.Tensor) else list(out) if isinstance(out, (list, tuple)) else []
        if not results or not all(isinstance(result, torch.Tensor) and _is_countable(result) for result in results):
            return
        tensors = list(tensors_in((args, kwargs)))
        if not tensors and func not in _FACTORIES:
            return
        if any(tensor not in self._values for tensor in tensors):
            return
        with no_dispatch(), torch.no_grad():
            real = func(*self._real(args), **self._real(_on_host(kwargs)))
        for fake, value in zip(results, [real] if isinstance(real, torch.Tensor) else real, strict=True):
            self._values[fake] = value

    def _forget(self, written: Iterable[torch.Tensor]) -> None:
        # Writing to a view changes what it is a view of.
        storages = {tensor.untyped_storage()._cdata for tensor in written if not tensor.is_floating_point()}
        if storages:
            for fake in list(self._values.keys()):
                if fake.untyped_storage()._cdata in storages:
                    del self._values[fake]

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._values[value]
        if isinstance(value, (list, tuple)):
            return type(value)(self._real(item) for item in value)
        if isinstance(value, dict):
            return {name: self._real(item) for name, item in value.items()}
        return value


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Values are computed where there is a processor, whatever the fakes are on."""
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def _is_countable(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= LARGEST


def constant_of(fake: torch.Tensor) -> int | float | bool | None:
    """The number that a fake mode keeps of a tensor written out in the code, such as a learning rate, if it does."""
    constant: torch.Tensor | None = getattr(fake, "constant", None)
    if constant is None:
        return None
    with no_dispatch():
        number: int | float | bool = constant.item()
    return number
