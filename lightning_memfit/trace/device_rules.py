"""How the device of a forecast computes, where that decides what is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

DeviceType = Literal["cpu", "cuda"]


class DeviceRules(Protocol):
    """Makes a run on fakes, which always live on the CPU, allocate what a real one on another device would."""

    @property
    def device_type(self) -> DeviceType:
        """The device that the fakes stand for."""

    @property
    def has_host_apart(self) -> bool:
        """Whether tensors of the host are not on the device: then they are not followed."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on fakes as the device's own kernel would: dtypes taken, memory formats of the results."""

    def is_on_host(self, func: Any, tensor: torch.Tensor, *, from_host: bool) -> bool:
        """Whether a result of an operator is on the host, and takes nothing of the device.

        Args:
            func: the operator.
            tensor: its result.
            from_host: whether it has tensor arguments, and all of them are on the host.
        """

    def behaviour(self) -> AbstractContextManager[None]:
        """Within this context torch takes the device's branches; everything is put back at the end."""
