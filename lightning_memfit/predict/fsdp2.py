"""What one rank allocates and frees under ``fully_shard`` (FSDP2), from the step of one device that holds everything.

The order in which torch 2.9 to 2.13 gathers, looks ahead, reduces and lets go
(``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``, ``_fsdp_state.py`` and ``_fsdp_collectives.py``):

1. In front of a group's forward its parameters are gathered into one buffer and copied out of it, one storage for each.
   The buffer is kept until the next group has been gathered, the last one until the root's forward ends.
2. Behind the forward the copies go, but not those of the outermost group, or of any without ``reshard_after_forward``.
3. In front of a group's backward the copies come back, the buffer goes at once, and the buffer of the group before it
   in the order of forwards is gathered ahead.
4. Behind the backward the copies go, then the buffer in which the group before was reduced; the whole gradients are
   copied into a new one and go; the rank's share of the sums is one storage for the whole group. In a later slice it is
   added to the share that is there.
5. When the backward is over, groups whose inputs need no gradient (the outermost among them) do 4., and the last
   buffer goes.
6. Under a mixed-precision policy the rank's shares are cast in front of gathering, and go when it is done; the buffer
   and the copies are of ``param_dtype``, and so are whole gradients. What they are reduced in is of ``reduce_dtype``,
   and the share of the sums is cast to the parameters' own dtype. Whole gradients that wait are of ``reduce_dtype``:
   behind the backward of a group those of its slice are cast to it, or added to those that wait.

Compared with torch's own engine, followed on fakes, in ``tests/predict/test_fsdp2.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.plan import Category, Phase
from lightning_memfit.predict.optimizer_step import with_optimizer_step
from lightning_memfit.predict.shard_groups import ShardedParameter, ShardGroup, shard_groups, shares_by_storage
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import Event, Free, Operation, Output, Timeline

Collectives = Literal["nccl", "gloo"]
"""Who moves bytes between ranks: gloo, on hosts, takes copies of what it gathers and reduces; NCCL takes none of
torch's allocator."""

_ADDED_BY_AUTOGRAD = "aten.add_.Tensor"
_ADDED_TO_SUMS = "fsdp.add_to_sums"
_AVERAGE_SCALAR_BYTES = 12  # gloo divides by the number of ranks: a number in float64 and in float32


def fsdp2_timeline(
    timeline: Timeline,
    sharding: Sharding,
    optimizer_step: Timeline | None = None,
    *,
    collectives: Collectives = "nccl",
    slices_per_batch: int | None = None,
) -> Timeline:
    """The step of the first rank, which holds most where rows cannot be divided evenly.

    Args:
        timeline: one optimizer step of the whole module on one device, in the dtypes of the policy: see
            :attr:`StepProgram.group_precision`. Its optimizer's step is of whole parameters; it is left out where
            ``optimizer_step`` is given.
        sharding: ranks, groups, ``reshard_after_forward``, the policy's dtypes, and when gradients are exchanged.
        optimizer_step: the optimizer's step over one rank's shares, traced alone.
        collectives: what exchanges between ranks.
        slices_per_batch: slices of one Lightning batch; by default all of the window. It matters where gradients are
            exchanged once per batch and there are several batches.

    Raises:
        UnsupportedError: if the sharding is none of FSDP2, the timeline does not tell its parameters, or one of them
            cannot be divided.

    Ignores: groups of several modules; a block that is called several times in a row, which counts as one call, so that
    a rank may need less by what is gathered of one block; that the state of the random generator that is restored for a
    block that is recomputed (5,056 bytes) comes behind the exchange of the block before it; that a ``training_step``
    which calls its own module is two forwards of the root for torch, with no block fetched ahead for the second: a rank
    may need less by one; that clipping works on shares; tensors of some bytes with which torch describes the ranks.
    On a GPU, that torch gathers and reduces on streams of their own: what one stream frees, another cannot take at
    once, so that more may be reserved. None of this has been compared with a GPU.
    """
    if sharding.engine != "fsdp2":
        raise UnsupportedError(f"{sharding.label} is not FSDP2.")
    if not timeline.parameters:
        raise UnsupportedError("The step does not tell its parameters, so that they cannot be divided.")
    groups = shard_groups(timeline, sharding)
    window = timeline if optimizer_step is None else with_optimizer_step(timeline, optimizer_step)
    shares = shares_by_storage(timeline, groups)
    per_batch = slices_per_batch or timeline.micro_steps
    rank = _Rank(window, groups, sharding, collectives, per_batch)
    for event in window.events:
        rank.pass_on(event)
    rank.finish()
    residents = tuple(
        each._replace(allocated_bytes=shares[each.storage])
        if each.category in ("parameters", "gradients") and each.storage in shares
        else each
        for each in window.residents
    )
    return replace(
        window,
        residents=residents,
        events=tuple(rank.events),
        categories={**window.categories, **rank.categories},
        parameters=tuple(
            layout._replace(size=(-(-layout.size[0] // sharding.ranks), *layout.size[1:]))
            if layout.storage in shares
            else layout
            for layout in timeline.parameters
        ),
        calls=(),
    )


def _copied_in(sent: Sequence[ShardedParameter], *, waited: bool) -> int:
    """What a host takes to copy whole gradients into the buffer in which they are sent.

    Those whose rows cannot be divided evenly are filled up in copies, all at once; where the buffer is of another
    dtype, each in turn is copied once more.

    Source: measured with a counting allocator on torch 2.13: ``torch.ops.fsdp.chunk_cat``.

    Args:
        sent: of the parameters that have a gradient.
        waited: whether gradients are of the buffer's dtype already, since they waited in it.
    """
    sizes = [each.sent_bytes if waited else each.whole_bytes for each in sent]
    filled_up = sum(size for each, size in zip(sent, sizes, strict=True) if each.is_filled_up)
    is_cast = any(size != each.sent_bytes for each, size in zip(sent, sizes, strict=True))
    return filled_up + (max(sizes) if is_cast else 0)


@dataclass(kw_only=True)
class _State:
    """Of one group, as the step goes."""

    copies: list[int] = field(default_factory=list)
    """Storages of the gathered parameters, while they are there."""
    buffer: int | None = None
    """What has been gathered and not copied out yet."""
    calls: list[int] = field(default_factory=list)
    """Places of its forwards in their order, whose backwards are to come."""
    shares: dict[int, int] = field(default_factory=dict)
    """By parameter: storage of the rank's share of its gradient in this window."""
    sums: dict[int, int] = field(default_factory=dict)
    """By parameter: storage of its whole gradient in ``reduce_dtype``, while it waits to be exchanged."""
    in_backward: bool = False


class _Rank:
    """Writes the rank's events, group by group as the engine does."""

    def __init__(
        self,
        window: Timeline,
        groups: Sequence[ShardGroup],
        sharding: Sharding,
        collectives: Collectives,
        slices_per_batch: int,
    ) -> None:
        self.events: list[Event] = []
        self.categories: dict[int, Category] = {}
        self._window = window
        self._groups = sorted(groups, key=lambda group: len(group.name))
        self._states = {group.name: _State() for group in groups}
        self._ranks = sharding.ranks
        self._reshards = sharding.reshard_after_forward
        self._is_on_a_host = collectives == "gloo"
        self._copies_inside = self._is_on_a_host and sharding.ranks > 1
        self._next = 1 + max([*(r.storage for r in window.residents), *window.categories], default=0)
        self._old = {resident.storage for resident in window.residents}
        self._phase: Phase = "forward"
        self._micro_step = -1
        self._open: list[ShardGroup] = []
        self._order: list[ShardGroup] = []
        self._root_has_begun = False
        self._kept_buffer: int | None = None
        self._reduced: int | None = None
        self._whole: dict[int, int] = {}
        self._held_whole: set[int] = set()
        self._defers = sharding.synchronisation == "step" and slices_per_batch > 1
        self._earlier_batches = self._defers and window.micro_steps > slices_per_batch
        self._adds_up_apart = self._defers and sharding.reduce_dtype not in (None, sharding.param_dtype)

    # Events of the step of one device

    def pass_on(self, event: Event) -> None:
        """One event: what the engine does in front of it, and the event where it happens on the rank too."""
        if isinstance(event, Free):
            self._pass_free(event)
            return
        if (event.phase, event.micro_step) != (self._phase, self._micro_step):
            self._enter(event)
        if event.phase == "forward":
            self._forward(event)
        elif event.phase == "backward":
            self._backward(event)
            if self._is_added_elsewhere(event):
                return
        self.events.append(event)
        for output in event.outputs:
            if output.storage in self._window.gradient_of:
                self._hold(output.storage, self._window.gradient_of[output.storage])

    def finish(self) -> None:
        """There are no more events."""
        if self._phase == "backward":
            self._end_backward()

    def _pass_free(self, event: Free) -> None:
        if event.storage in self._held_whole:
            return  # a whole gradient goes when it is reduced
        if self._earlier_batches and event.storage in self._window.gradient_of and event.storage in self._old:
            return  # stands for the shares of earlier batches, which are there throughout
        self.events.append(event)

    def _is_added_elsewhere(self, event: Operation) -> bool:
        """Whether autograd adds a gradient to that of an earlier slice: whole ones are not there, shares are added."""
        if event.op != _ADDED_BY_AUTOGRAD or event.outputs or (self._defers and not self._adds_up_apart):
            return False
        into = [each for each in event.reads if each in self._window.gradient_of and each not in self._old]
        added = [each for each in event.reads if each not in self._window.gradient_of]
        if len(into) != 1 or len(added) != 1:
            return False
        self._hold(added[0], self._window.gradient_of[into[0]])
        return True

    def _hold(self, storage: int, parameter: int) -> None:
        self._whole[parameter] = storage
        self._held_whole.add(storage)

    def _enter(self, event: Operation) -> None:
        if self._phase == "forward" and event.phase != "forward":
            self._close_forward(())
        if self._phase == "backward":
            self._end_backward()
        self._phase, self._micro_step = event.phase, event.micro_step
        self._root_has_begun = False

    # Forward

    def _forward(self, event: Operation) -> None:
        around = self._around(event)
        self._close_forward(around)
        for group in around:
            if group not in self._open:
                self._gather(group)
                self._copy_out(group, keeps_buffer=True)
                self._open.append(group)

    def _close_forward(self, around: Sequence[ShardGroup]) -> None:
        while self._open and self._open[-1] not in around:
            group = self._open.pop()
            if self._open and self._reshards:
                self._let_go(group)
            self._states[group.name].calls.append(len(self._order))
            self._order.append(group)
            if not self._open and self._kept_buffer is not None:
                self._free(self._kept_buffer)
                self._kept_buffer = None

    # Backward

    def _backward(self, event: Operation) -> None:
        around = self._around(event)
        if not self._root_has_begun:
            if not around:
                return  # of the loss, which is not computed in the root
            self._root_has_begun = True
            self._begin_backward(self._order[-1])
        if not event.module:
            return  # autograd's own sums and stores, which end nothing
        for group in reversed(self._groups):
            if self._states[group.name].in_backward and group not in around and group is not self._order[-1]:
                self._end_group(group)
        for group in around:
            if not self._states[group.name].in_backward:
                self._begin_backward(group)

    def _begin_backward(self, group: ShardGroup) -> None:
        state = self._states[group.name]
        state.in_backward = True
        self._gather(group)
        self._copy_out(group, keeps_buffer=False)
        if state.calls:
            place = state.calls.pop()
            if place:
                self._gather(self._order[place - 1])

    def _end_group(self, group: ShardGroup) -> None:
        self._states[group.name].in_backward = False
        self._add_to_sums(group)
        self._let_go(group)
        if not self._is_exchanging():
            self._begin_sums(group)
            return
        if self._reduced is not None:
            self._free(self._reduced)
            self._reduced = None
        sums = self._states[group.name].sums
        sent = [each for each in group.parameters if each.index in self._whole or each.index in sums]
        if sent:
            self._reduce(group, sent)

    def _add_to_sums(self, group: ShardGroup) -> None:
        """Gradients of this slice are added to those that wait in another dtype, and go."""
        sums = self._states[group.name].sums
        for each in group.parameters:
            if each.index in sums and each.index in self._whole:
                if self._is_on_a_host:  # where operands of two dtypes are made equal first
                    self._use(_ADDED_TO_SUMS, each.sum_bytes, group)
                self._free(self._whole.pop(each.index))

    def _begin_sums(self, group: ShardGroup) -> None:
        """The first gradients that wait are cast to the dtype in which they are added up."""
        if not self._adds_up_apart:
            return
        sums = self._states[group.name].sums
        for each in group.parameters:
            if each.index in self._whole:
                sums[each.index] = self._allocate("fsdp.wait", each.sum_bytes, "gradients", group)
                self._free(self._whole.pop(each.index))

    def _reduce(self, group: ShardGroup, sent: Sequence[ShardedParameter]) -> None:
        size, sums = sum(each.sent_bytes for each in sent), self._states[group.name].sums
        self._reduced = self._allocate("fsdp.reduce_scatter", size, "communication", group)
        if self._is_on_a_host:
            self._use("fsdp.chunk_cat", _copied_in(sent, waited=bool(sums)), group)
        whole = [sums.pop(each.index) if each.index in sums else self._whole.pop(each.index) for each in sent]
        # Of the loop over them, which is over, torch holds the last one until it returns.
        held = [whole.pop()] if self._ranks > 1 else []
        self._free_all(whole)
        share = self._allocate("fsdp.reduce_scatter", size // self._ranks, "gradients", group)
        if self._copies_inside:
            self._use("gloo", size + _AVERAGE_SCALAR_BYTES, group)
        own = sum(each.share_bytes for each in sent)
        if own != size // self._ranks:  # added up in another dtype
            reduced, share = share, self._allocate("fsdp.cast", own, "gradients", group)
            self._free(reduced)
        self._free_all(held)
        shares = self._states[group.name].shares
        if self._earlier_batches or all(each.index in shares for each in sent):
            self._free(share)
        else:
            shares.update({each.index: share for each in sent})

    def _end_backward(self) -> None:
        for group in self._groups:  # the outermost first
            state = self._states[group.name]
            if state.in_backward or state.copies:
                self._end_group(group)
            if state.buffer is not None:
                self._free(state.buffer)
                state.buffer = None
            state.calls.clear()
        self._order.clear()
        if self._reduced is not None:
            self._free(self._reduced)
            self._reduced = None

    def _is_exchanging(self) -> bool:
        return not self._defers or self._micro_step + 1 == self._window.followed_micro_steps

    # What the engine does with one group

    def _gather(self, group: ShardGroup) -> None:
        state = self._states[group.name]
        if state.copies or state.buffer is not None or not group.parameters:
            return
        size = group.whole_bytes if self._ranks > 1 else 0
        cast = self._cast(group.cast_bytes if self._ranks > 1 else 0, group)
        state.buffer = self._allocate("fsdp.all_gather", size, "communication", group)
        if self._copies_inside:
            self._use("gloo", size, group)
        self._free_all(cast)

    def _copy_out(self, group: ShardGroup, *, keeps_buffer: bool) -> None:
        state = self._states[group.name]
        if state.buffer is None:
            return
        if keeps_buffer and self._kept_buffer is not None:
            self._free(self._kept_buffer)
            self._kept_buffer = None
        casts: list[int] = []
        for each in group.parameters:
            if self._ranks == 1:  # nothing was gathered: each is cast by itself, and goes when the next one is there
                cast = self._cast(each.cast_bytes, group)
                self._free_all(casts)
                casts = cast
            copy = self._allocate("fsdp.split_with_sizes_copy", each.whole_bytes, "communication", group)
            state.copies.append(copy)
        self._free_all(casts)
        if keeps_buffer:
            self._kept_buffer = state.buffer
        else:
            self._free(state.buffer)
        state.buffer = None

    def _cast(self, num_bytes: int, group: ShardGroup) -> list[int]:
        return [self._allocate("fsdp.cast", num_bytes, "communication", group)] if num_bytes else []

    def _let_go(self, group: ShardGroup) -> None:
        state = self._states[group.name]
        self._free_all(state.copies)
        state.copies = []

    def _around(self, event: Operation) -> list[ShardGroup]:
        """The groups that an operator runs within.

        In a step that calls the module itself, what no module runs is beside the root. In one that does not, such as
        the ``training_step`` of a ``LightningModule``, it is within: that is what
        :func:`~lightning_memfit.sharded_model.fully_shard` makes the root's forward. Where nothing tells, it is taken
        to be within, with which a rank is not said to need too little.
        """
        if event.outside and self._window.calls_root:
            return []
        return [group for group in self._groups if group.holds(event.module)]

    # Writing

    def _allocate(self, op: str, num_bytes: int, category: Category, group: ShardGroup) -> int:
        storage, self._next = self._next, self._next + 1
        self.categories[storage] = category
        outputs = (Output(storage, 0, num_bytes),)
        self.events.append(Operation(op, group.name, self._phase, None, outputs, micro_step=max(0, self._micro_step)))
        return storage

    def _free(self, storage: int) -> None:
        self.events.append(Free(storage, self._phase))

    def _free_all(self, storages: Sequence[int]) -> None:
        for storage in storages:
            self._free(storage)

    def _use(self, op: str, num_bytes: int, group: ShardGroup) -> None:
        if num_bytes:
            self._free(self._allocate(op, num_bytes, "communication", group))
