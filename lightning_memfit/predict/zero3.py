"""ZeRO 3: every parameter in shares, whole only around its module; gradients through a bucket that is always there.

Source of every number: ``deepspeed/runtime/zero/stage3.py`` 0.19.8, by the function named beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_memfit.plan import Offload
from lightning_memfit.predict.gradient_arrivals import Arrival
from lightning_memfit.predict.module_visits import Visit, module_visits
from lightning_memfit.predict.step_writer import StepWriter
from lightning_memfit.predict.zero_gathering import GatheredParameters, NothingToGather
from lightning_memfit.predict.zero_layout import (
    Collectives,
    ZeroSettings,
    bytes_each,
    elements_of,
    pinned_bytes,
    share_of,
)
from lightning_memfit.trace.timeline import FlatStep, Timeline

_MASTER_BYTES = 4  # of an element of master weights and of the gradient that the optimizer sees
_NORM_BYTES = 8  # norms are taken of a float64 copy: get_norm_dtype in zero/utils.py


class ShardedParameters:
    """Writes what the engine does beside forward and backward."""

    weights_last = False  # zero3_linear_wrap in zero/linear.py is one function

    def __init__(
        self,
        timeline: Timeline,
        writer: StepWriter,
        settings: ZeroSettings,
        steps: Sequence[FlatStep],
        *,
        offload: Offload,
        collectives: Collectives,
        host_is_device: bool,
    ) -> None:
        """Write what is there before the step.

        Args:
            timeline: as for ``zero_timeline``, also those that follow.
            writer: gets what is allocated and freed.
            settings: of ZeRO.
            steps: by parameter group.
            offload: what is on the host.
            collectives: what exchanges between ranks.
            host_is_device: as on a CPU: nothing is copied between the two, and nothing is pinned.
        """
        self._writer, self._settings = writer, settings
        self._offloads, self._gloo = offload != "never", collectives == "gloo"
        self._shares_on_host, self._pins = offload == "parameters", not host_is_device
        parameters = timeline.parameters
        self._elements = {index: elements_of(each) for index, each in enumerate(parameters)}
        self._bytes = {index: bytes_each(each) for index, each in enumerate(parameters)}
        self._storages = {each.storage for each in parameters}
        self._groups = [each.parameters for each in steps]
        self._trained = [index for group in self._groups for index in group]
        self._gradient_bytes = max((self._bytes[index] for index in self._trained), default=_MASTER_BYTES)
        self._waiting: list[int] = []
        self._own_storage: dict[int, int] = {}
        self._steps = [writer.adopt(each.step, on_host=self._offloads) for each in steps]
        self._write_residents()
        self._gathered = (
            NothingToGather()
            if settings.ranks == 1 and not (self._shares_on_host and not host_is_device)
            else GatheredParameters(
                writer,
                settings,
                elements=self._elements,
                element_bytes=self._bytes,
                gloo=self._gloo,
                from_host=self._shares_on_host and not host_is_device,
            )
        )
        self._visits = module_visits(timeline)
        self._micro_step = -1
        self._late: list[Visit] = []

    def replaces(self, storage: int) -> bool:
        """Whether a resident is there in shares only."""
        return storage in self._storages

    def takes(self, arrival: Arrival) -> bool:
        """Whether the engine decides when what holds a gradient is freed."""
        return True

    def before(self, index: int) -> None:
        """Modules that are reached or left in front of an event."""
        found = next(((step, each) for step, each in self._visits.items() if index in each.before), None)
        if found is None:
            return
        step, visits = found
        if step != self._micro_step:
            self._micro_step = step
            self._gathered.begin(visits.order)
        for visit in visits.before[index]:
            self._follow(visit)

    def after(self, index: int) -> None:
        """Modules that are left behind an event."""
        for visits in self._visits.values():
            for visit in visits.after.get(index, ()):
                self._follow(visit)

    def gradient(self, arrival: Arrival, *, is_boundary: bool) -> None:
        """A gradient is complete (``reduce_independent_p_g_buckets_and_remove_grads``)."""
        if arrival.parameter not in self._trained:
            return
        elements, limit = self._elements[arrival.parameter], self._settings.bucket_elements
        filled = sum(self._elements[index] for index in self._waiting)
        if filled and filled + elements > limit:
            self._reduce()
            filled = 0
        if filled + elements > limit:  # too large for the bucket: it keeps its own memory
            self._own_storage[arrival.parameter] = arrival.storage
        else:
            self._writer.free(arrival.storage)
        self._waiting.append(arrival.parameter)

    def backward_ended(self, *, is_boundary: bool) -> None:
        """The backward of a slice is done (``independent_gradient_partition_epilogue``)."""
        self._reduce()
        for visit in self._late:  # release_backward_leftovers
            self._gathered.release(visit.module, visit.parameters, kept_for_later=False)
        self._late = []

    def step(self) -> None:
        """Every group's share is stepped (``step``)."""
        writer = self._writer
        self._gathered.release_all()
        if not self._offloads:  # get_grad_norm_direct
            largest = max((self._share(index) for index in self._trained), default=0)
            writer.use("zero.norm", largest * _NORM_BYTES, "temporaries")
        for group, step in zip(self._groups, self._steps, strict=True):
            gradient = None if self._offloads else self._flat_gradient(group)
            writer.run(step)
            if gradient is not None:
                writer.free(gradient)
        self._gathered.gather_persistent()

    def _flat_gradient(self, group: Sequence[int]) -> int | None:
        """The flat ``float32`` gradient (``_prepare_fp32_grad_for_sub_group``); ``None`` where it is a view."""
        writer, elements = self._writer, self._total_share(group)
        one = len(group) == 1
        flat = None if one else writer.allocate("zero.flatten", elements * self._gradient_bytes, "gradients")
        if self._gradient_bytes == _MASTER_BYTES:
            return flat
        converted = writer.allocate("zero.gradient", elements * _MASTER_BYTES, "gradients")
        if flat is not None:
            writer.free(flat)
        return converted

    def _reduce(self) -> None:
        """Average over the ranks, and keep this one's share (``__avg_scatter_grads``, ``partition_grads``)."""
        if not self._waiting:
            return
        writer, ranks = self._writer, self._settings.ranks
        whole = self._total_share(self._waiting) * ranks * self._gradient_bytes
        alone = len(self._waiting) == 1 and self._elements[self._waiting[0]] % ranks == 0
        held = [] if alone else [writer.allocate("zero.reduce_scatter", whole, "communication")]
        if self._gloo:
            writer.use("zero.reduce_scatter", whole, "communication")
        for parameter in self._waiting:
            if self._offloads:
                writer.use("zero.norm", self._share(parameter) * _NORM_BYTES, "temporaries")
                if self._gradient_bytes != _MASTER_BYTES:
                    writer.use("zero.to_host", self._share(parameter) * _MASTER_BYTES, "temporaries")
            storage = self._own_storage.pop(parameter, None)
            if storage is not None:
                writer.free(storage)
        writer.free(*held)
        self._waiting = []

    def _follow(self, visit: Visit) -> None:
        if visit.enters:
            self._gathered.fetch(visit.module, visit.parameters)
        elif visit.leaves_late:
            self._late.append(visit)
        else:
            self._gathered.release(visit.module, visit.parameters)

    def _share(self, index: int) -> int:
        return share_of(self._elements[index], self._settings.ranks)

    def _total_share(self, parameters: Iterable[int]) -> int:
        return sum(self._share(index) for index in parameters)

    def _write_residents(self) -> None:
        writer, each, host = self._writer, self._gradient_bytes, self._offloads
        for index in self._elements:
            if index not in self._trained:  # _partition_param in partition_parameters.py
                size = self._share(index) * self._bytes[index]
                writer.resident(size, "parameters", on_host=self._shares_on_host)
        share = self._total_share(self._trained)
        if self._shares_on_host:  # _create_param_groups_fp16_flat_cpu_memory, those that stay whole among them
            for group in self._groups:
                size = self._total_share(group) * each
                writer.resident(pinned_bytes(size) if self._pins else size, "parameters", on_host=True)
        else:
            writer.resident(share * each, "parameters")
        # _create_fp32_partitions means to share float32 parameters, but compares a device with its name: never equal
        writer.resident(share * _MASTER_BYTES, "optimizer_states", on_host=host)
        writer.resident(share * each, "gradients", on_host=host)
        if host:
            writer.resident(share * _MASTER_BYTES, "gradients", on_host=True)
        writer.resident(self._settings.bucket_elements * each, "communication")
