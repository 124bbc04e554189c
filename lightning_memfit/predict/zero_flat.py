"""ZeRO 1 and 2: parameters in one flat tensor for each group, gradients through a bucket, a partition stepped.

Source of every number: ``deepspeed/runtime/zero/stage_1_and_2.py`` 0.19.8, by the function named beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_memfit.predict.gradient_arrivals import Arrival
from lightning_memfit.predict.step_writer import StepWriter
from lightning_memfit.predict.zero_layout import Collectives, FlatGroup, ZeroSettings, bytes_each, elements_of
from lightning_memfit.trace.timeline import FlatStep, Timeline

_MASTER_BYTES = 4  # of an element of master weights and of the gradient that the optimizer sees
_NORM_BYTES = 8  # norms are taken of a float64 copy: get_norm_dtype in zero/utils.py


class FlatPartitions:
    """Writes what the engine does beside forward and backward."""

    weights_last = True  # autograd's own layers: a bias arrives before its weight

    def __init__(
        self,
        timeline: Timeline,
        writer: StepWriter,
        settings: ZeroSettings,
        steps: Sequence[FlatStep],
        *,
        rank: int,
        offloads: bool,
        collectives: Collectives,
    ) -> None:
        """Write what is there before the step; arguments are those of ``zero_timeline``."""
        self._writer, self._settings = writer, settings
        self._steps = [writer.adopt(each.step, on_host=offloads) for each in steps]
        self._rank, self._offloads, self._gloo = rank, offloads, collectives == "gloo"
        parameters = timeline.parameters
        self._elements = {index: elements_of(each) for index, each in enumerate(parameters)}
        self._groups = [FlatGroup.of(each.parameters, self._elements, settings.ranks) for each in steps]
        self._pieces = {index: found for group in self._groups for index, found in group.pieces.items()}
        self._flat = {parameters[index].storage for index in self._pieces}
        self._bytes = max((bytes_each(parameters[index]) for index in self._pieces), default=_MASTER_BYTES)
        # Stage 1 reduces once a step: it is told of every slice's gradients, and accumulates on the device.
        self._accumulates_on_host = offloads and settings.stage == 2 and timeline.micro_steps > 1
        self._held: dict[int, int] = {}
        self._buckets: list[int] = []
        self._waiting: list[int] = []
        self._own_storage: dict[int, int] = {}
        self._left: list[int] = []
        self._new_gradients: int | None = None
        self._gradients: int | None = None
        self._write_residents()

    def replaces(self, storage: int) -> bool:
        """Whether a resident's place is in a flat tensor."""
        return storage in self._flat

    def takes(self, arrival: Arrival) -> bool:
        """Whether the engine decides when what holds a gradient is freed."""
        return self._settings.stage == 2 or not arrival.accumulates

    def before(self, index: int) -> None:
        """Nothing to do between the operators of a module."""

    def after(self, index: int) -> None:
        """Nothing to do between the operators of a module."""

    def gradient(self, arrival: Arrival, *, is_boundary: bool) -> None:
        """A gradient is complete (``process_gradients``).

        Args:
            arrival: which, and where.
            is_boundary: whether the optimizer steps after this backward.
        """
        if arrival.parameter not in self._pieces:
            return
        if not self._buckets:
            size = self._settings.bucket_elements * self._bytes  # setup_buckets
            for _ in range(self._settings.buckets):
                self._buckets.append(self._writer.allocate("zero.bucket", size, "communication"))
        if self._settings.stage == 2:
            self._put(arrival.parameter, arrival.storage)
            return
        if not arrival.accumulates:
            self._held[arrival.parameter] = arrival.storage
        if is_boundary and self._settings.overlaps:
            self._put(arrival.parameter, self._held.pop(arrival.parameter))

    def backward_ended(self, *, is_boundary: bool) -> None:
        """The backward of a slice is done (``reduce_gradients``, ``independent_gradient_partition_epilogue``)."""
        if self._settings.stage == 1 and not is_boundary:
            return
        for parameter in [each for each in self._pieces if each in self._held]:
            self._put(parameter, self._held.pop(parameter))
        self._reduce()
        self._writer.free(*self._left)
        self._left = []
        if self._new_gradients is not None:
            if self._gradients is None:
                self._gradients = self._new_gradients
            else:  # they have been added to those of the slices before
                self._writer.free(self._new_gradients)
        self._new_gradients = None
        self._writer.free(*self._buckets)
        self._buckets = []

    def step(self) -> None:
        """Every group's partition is stepped, and all ranks get the new parameters (``step``)."""
        writer = self._writer
        if not self._offloads:  # get_grad_norm_direct
            largest = max((group.largest_piece(self._rank) for group in self._groups), default=0)
            writer.use("zero.norm", largest * _NORM_BYTES, "temporaries")
        for place, (group, step) in enumerate(zip(self._groups, self._steps, strict=True)):
            if self._offloads:
                writer.run(step)
                continue
            gradient = self._flat_gradient(group)
            if gradient is not None and self._gradients is not None and place + 1 == len(self._groups):
                writer.free(self._gradients)  # one storage for all groups
                self._gradients = None
            writer.run(step)
            if gradient is not None:
                writer.free(gradient)
        if self._gradients is not None:
            writer.free(self._gradients)
        if self._gloo:
            for group in self._groups:
                whole = group.partition * self._settings.ranks * self._bytes
                writer.use("zero.all_gather", whole, "communication")

    def _flat_gradient(self, group: FlatGroup) -> int | None:
        """The flat ``float32`` gradient; ``None`` where it is a view of what is there."""
        writer, one = self._writer, group.tensors_of(self._rank) == 1
        flat = None if one else writer.allocate("zero.flatten", group.partition * self._bytes, "gradients")
        if self._bytes == _MASTER_BYTES:
            return flat
        converted = writer.allocate("zero.gradient", group.partition * _MASTER_BYTES, "gradients")
        if flat is not None:
            writer.free(flat)
        return converted

    def _put(self, parameter: int, storage: int) -> None:
        """Into the bucket (``reduce_independent_p_g_buckets_and_remove_grads``)."""
        elements, limit = self._elements[parameter], self._settings.bucket_elements
        if self._total(self._waiting) + elements > limit:
            self._reduce()
        if elements > limit:  # it passes the bucket by, and keeps its own memory
            if self._offloads:
                copy = self._writer.allocate("zero.clone", elements * self._bytes, "gradients")
                self._writer.free(storage)
                storage = copy
            self._own_storage[parameter] = storage
        else:
            self._writer.free(storage)
        self._waiting.append(parameter)

    def _reduce(self) -> None:
        """Average over the ranks, and keep what is in this one's partition (``reduce_ipg_grads``)."""
        if not self._waiting:
            return
        slices = self._slices(self._waiting)
        for part in _sub_buckets(slices, self._settings.bucket_elements):
            if len(part) > 1:  # allreduce_bucket flattens
                self._writer.use("zero.all_reduce", sum(part) * self._bytes, "communication")
        for parameter in self._waiting:
            if self._rank in dict(self._pieces[parameter]):
                self._keep(parameter)
            storage = self._own_storage.pop(parameter, None)
            if storage is not None:
                in_partition = self._rank in dict(self._pieces[parameter])
                if in_partition or self._settings.stage == 2:
                    self._writer.free(storage)
                else:
                    self._left.append(storage)
        self._waiting = []

    def _slices(self, parameters: Iterable[int]) -> list[int]:
        """Elements of neighbours in a bucket that go to one rank (``average_tensor``)."""
        sizes: list[int] = []
        before: int | None = None
        for parameter in parameters:
            for rank, size in self._pieces[parameter]:
                if rank == before:
                    sizes[-1] += size
                else:
                    sizes.append(size)
                before = rank
        return sizes

    def _keep(self, parameter: int) -> None:
        """What lies in the partition goes to where it waits for the step (``copy_grads_in_partition``)."""
        writer = self._writer
        if self._offloads:
            size = dict(self._pieces[parameter])[self._rank]
            writer.use("zero.norm", size * _NORM_BYTES, "temporaries")
            if self._bytes != _MASTER_BYTES:
                writer.use("zero.to_host", size * _MASTER_BYTES, "temporaries")
            return
        if self._new_gradients is None:
            inside = [index for group in self._groups for index in group.parameters_of(self._rank)]
            self._new_gradients = writer.allocate("zero.gradients", self._total(inside) * self._bytes, "gradients")

    def _total(self, parameters: Iterable[int]) -> int:
        return sum(self._elements[index] for index in parameters)

    def _write_residents(self) -> None:
        writer, ranks = self._writer, self._settings.ranks
        for group in self._groups:
            writer.resident(group.partition * ranks * self._bytes, "parameters")
            writer.resident(group.partition * _MASTER_BYTES, "optimizer_states", on_host=self._offloads)
            if self._offloads:  # the gradient, and the new parameters on their way back
                writer.resident(group.partition * _MASTER_BYTES, "gradients", on_host=True)
                writer.resident(group.partition * self._bytes, "parameters", on_host=True)
        if self._offloads:
            largest = max((self._elements[index] for index in self._pieces), default=0) * self._bytes
            writer.resident(largest, "communication")
            writer.resident(largest, "communication", on_host=True)
            if self._accumulates_on_host:  # async_accumulate_grad_in_cpu_via_gpu
                for group in self._groups:
                    for index in group.parameters_of(self._rank):
                        writer.resident(self._elements[index] * self._bytes, "gradients", on_host=True)


def _sub_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """What is reduced at once: as many slices as it takes to exceed the limit (``allreduce_and_scatter``)."""
    found: list[list[int]] = [[]]
    for size in sizes:
        found[-1].append(size)
        if sum(found[-1]) > limit:
            found.append([])
    return [each for each in found if each]
