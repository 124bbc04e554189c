"""Which parameters stage 3 holds whole at which moment: fetched with their module, ahead of it, or kept for later.

Source: ``PartitionedParameterCoordinator`` in ``deepspeed/runtime/zero/partitioned_param_coordinator.py`` 0.19.8, once
it knows the order of modules (from the third forward on); sizes from ``partition_parameters.py`` beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_memfit.predict.step_writer import StepWriter
from lightning_memfit.predict.zero_layout import ZeroSettings, share_of


@dataclass(kw_only=True)
class _Gather:
    """One exchange: what it brings, and what it holds until the last of it was asked for."""

    parameters: tuple[int, ...]
    flat: int | None
    arrived: bool = False
    unasked: set[int] = field(default_factory=set)
    sent: int | None = None


class GatheredParameters:
    """The parameters that are whole now."""

    def __init__(
        self,
        writer: StepWriter,
        settings: ZeroSettings,
        *,
        elements: Mapping[int, int],
        element_bytes: Mapping[int, int],
        gloo: bool,
        from_host: bool = False,
    ) -> None:
        """Those that are held whole between steps are there.

        Args:
            writer: gets what is allocated and freed.
            settings: thresholds.
            elements: by parameter.
            element_bytes: by parameter.
            gloo: whether exchanges allocate a copy of what they bring.
            from_host: whether a rank's own shares lie in another memory, and are copied to the device to be sent. Of
                one rank alone that copy is the parameter (``NoGatherHandle``, ``NoGatherCoalescedHandle``).
        """
        self._writer, self._settings, self._gloo, self._from_host = writer, settings, gloo, from_host
        self._elements, self._bytes = elements, element_bytes
        self._persistent = {index for index, size in elements.items() if size <= settings.persistent_elements}
        self._whole = {index: writer.resident(self._padded(index), "parameters") for index in self._persistent}
        self._flying: dict[int, _Gather] = {}
        self._users: dict[int, set[str]] = {index: set() for index in elements}
        self._visits: Sequence[tuple[str, tuple[int, ...]]] = ()
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched_for: dict[int, int] = {}
        self._step = self._available = 0

    def begin(self, visits: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """A forward begins (``reset_step``).

        Args:
            visits: modules with parameters of their own in the order in which forward and backward reach them.
        """
        self._visits = visits
        self._queue = deque((index, step) for step, (_, own) in enumerate(visits) for index in sorted(set(own)))
        self._fetched_for = dict.fromkeys(self._elements, -1)
        self._step = self._available = 0

    def fetch(self, module: str, own: Sequence[int]) -> None:
        """A module is reached (``fetch_sub_module``)."""
        self._gather([index for index in own if index not in self._whole and index not in self._flying])
        for index in own:
            self._users[index].add(module)
            self._wait(index)
        due = {index for index in own if self._fetched_for[index] < self._step}
        seen: set[int] = set()
        while self._queue and len(seen) < len(due):
            index, step = self._queue.popleft()
            self._fetched_for[index] = step
            seen.add(index)
        self._prefetch()
        self._step += 1

    def release(self, module: str, own: Iterable[int], *, kept_for_later: bool = True) -> None:
        """A module is left (``release_sub_module``).

        Args:
            module: its name.
            own: its parameters.
            kept_for_later: whether those that are used again soon stay.
        """
        to_free = {index for index in own if index not in self._persistent}
        if kept_for_later:
            to_free -= {index for index in to_free if self._fetched_for[index] > self._step}
            to_free -= self._used_soon()
        for index in own:
            self._users[index].discard(module)
            if index in to_free and index in self._whole and not self._users[index]:
                self._writer.free(self._whole.pop(index))
                self._available -= self._elements[index]

    def release_all(self) -> None:
        """The step begins: nothing stays whole (``_partition_all_parameters``)."""
        for index in list(self._flying):
            self._wait(index)
        self._writer.free(*self._whole.values())
        self._whole.clear()

    def gather_persistent(self) -> None:
        """The step is over: small parameters are whole again (``_post_step``).

        Own shares from the host are on the device meanwhile (``local_tensors`` in ``_allgather_params_coalesced``, and
        in ``_allgather_params_sequential``, which takes one parameter of one rank alone too).
        """
        sent = None
        if self._from_host and self._persistent and (self._settings.ranks > 1 or len(self._persistent) == 1):
            sent = self._writer.allocate("zero.to_device", self._own_bytes(self._persistent), "communication")
        self._whole = {
            index: self._writer.allocate("zero.all_gather", self._padded(index), "parameters")
            for index in sorted(self._persistent)
        }
        if sent is not None:
            self._writer.free(sent)
        if self._gloo:
            whole = sum(self._padded(index) for index in self._persistent)
            self._writer.use("zero.all_gather", whole, "communication")

    def _used_soon(self) -> set[int]:
        found: set[int] = set()
        passed = 0
        for _, own in self._visits[self._step :]:
            if passed >= self._settings.reuse_elements:
                break
            found.update(own)
            passed += sum(self._elements[index] for index in own)
        return found

    def _prefetch(self) -> None:
        limit = min(self._settings.live_elements - self._available, self._settings.prefetch_elements)
        ahead: dict[int, None] = {}
        total = 0
        while self._queue and total < limit:
            index, step = self._queue.popleft()
            self._fetched_for[index] = max(self._fetched_for[index], step)
            if index not in self._whole and index not in self._flying and index not in ahead:
                ahead[index] = None
                total += self._elements[index]
        self._gather(list(ahead))

    def _gather(self, parameters: Sequence[int]) -> None:
        """Begin to bring parameters from all ranks (``all_gather_coalesced``), or from the host of the only one."""
        if not parameters:
            return
        self._available += sum(self._elements[index] for index in parameters)
        if self._settings.ranks == 1:
            gather = _Gather(parameters=tuple(parameters), flat=None)
            for index in sorted(parameters):
                self._whole[index] = self._writer.allocate("zero.to_device", self._padded(index), "parameters")
            self._flying.update(dict.fromkeys(parameters, gather))
            return
        whole = sum(self._padded(index) for index in parameters)
        flat = self._writer.allocate("zero.all_gather", whole, "parameters")
        if self._gloo:
            self._writer.use("zero.all_gather", whole, "communication")
        gather = _Gather(parameters=tuple(sorted(parameters)), flat=flat, unasked=set(parameters))
        if len(parameters) == 1:  # it is the parameter from now on
            self._whole[parameters[0]] = flat
            gather.flat = None
            if self._from_host:  # held until it is waited for: stashed_for_allocator_safety_ in ProcessGroupNCCL.hpp
                gather.sent = self._writer.allocate("zero.to_device", self._own_bytes(parameters), "communication")
        elif self._from_host:  # the arguments of torch.cat in _all_gather_dtype
            self._writer.use("zero.to_device", self._own_bytes(parameters), "communication")
        self._flying.update(dict.fromkeys(parameters, gather))

    def _wait(self, index: int) -> None:
        """A parameter is needed: all that came with it are taken apart (``AllGatherCoalescedHandle.wait``)."""
        gather = self._flying.pop(index, None)
        if gather is None:
            return
        if gather.sent is not None:
            self._writer.free(gather.sent)
        if gather.flat is not None and not gather.arrived:
            for each in gather.parameters:
                size = self._elements[each] * self._bytes[each]
                self._whole[each] = self._writer.allocate("zero.cat", size, "parameters")
            gather.arrived = True
        gather.unasked.discard(index)
        if gather.flat is not None and not gather.unasked:
            self._writer.free(gather.flat)

    def _own_bytes(self, parameters: Iterable[int]) -> int:
        return sum(self._padded(index) for index in parameters) // self._settings.ranks

    def _padded(self, index: int) -> int:
        return share_of(self._elements[index], self._settings.ranks) * self._settings.ranks * self._bytes[index]


class NothingToGather:
    """Of one rank alone: a parameter is whole all the time, since the engine makes it a view of its only share.

    Where that lies on the host, and the host is not the device, it is copied: see :class:`GatheredParameters`.

    Source: ``_no_gather_coalesced`` in ``deepspeed/runtime/zero/partition_parameters.py`` 0.19.8.
    """

    def begin(self, visits: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Nothing is fetched in any order."""

    def fetch(self, module: str, own: Sequence[int]) -> None:
        """Nothing is brought from anywhere."""

    def release(self, module: str, own: Iterable[int], *, kept_for_later: bool = True) -> None:
        """The share stays."""

    def release_all(self) -> None:
        """The shares stay."""

    def gather_persistent(self) -> None:
        """Small parameters are views too."""
