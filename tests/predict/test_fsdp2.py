"""One rank's step derived from one device's: against torch's own engine on fakes, and against numbers by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memfit.applied_in_a_trace import checkpointed
from lightning_memfit.batch_tree import split_by_sizes
from lightning_memfit.errors import UnsupportedError
from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.predict.fsdp2 import fsdp2_timeline
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.predict.variants import StepVariants, Variant
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.optimizer_step import trace_optimizer_step
from lightning_memfit.trace.recording import record_window
from lightning_memfit.trace.step_program import StepProgram, program_of
from lightning_memfit.trace.timeline import Free, Operation, Timeline
from lightning_memfit.trace.training_step import trace_window

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    """A residual block, so that autograd adds two gradients behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embeddings around blocks."""

    def __init__(self, words: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))  # a policy may cast what blocks return


class Around(nn.Module):
    """Calls a network and not itself, as the training_step of a LightningModule does."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return next_word(self.net, ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


def next_word(module: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(module(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def program(words: int = 101, width: int = 24, depth: int = 2) -> StepProgram:
    return program_of(Net(words, width, depth), loss=next_word, optimizer=SGD)


def spread(program: StepProgram, ranks: int, **settings: Any) -> Sharding:
    groups = (*find_repeated_blocks(program.module), "")
    return Sharding(engine="fsdp2", ranks=ranks, **{"synchronisation": "slice", "shard_groups": groups} | settings)


def peaks(timeline: Timeline) -> MemoryBreakdown:
    return predict_memory(timeline)


def both(
    program: StepProgram,
    sharding: Sharding,
    *,
    samples: int = 6,
    slices: int = 1,
    accumulate: int = 1,
    recomputed: bool = False,
) -> tuple[Timeline, Timeline]:
    """The step of one rank without its optimizer's step: derived, and traced."""
    ids = torch.zeros(samples, 16, dtype=torch.long)
    trace = partial(
        trace_window,
        batch=ids,
        divide=lambda batch: split_by_sizes(batch, (samples // slices,) * slices),
        micro_steps=slices * accumulate,
        collect_signatures=False,
        steps=False,
    )
    with checkpointed(program.module, find_repeated_blocks(program.module) if recomputed else ()):
        whole, traced = trace(on_one_device(program, sharding)), trace(program, sharding=sharding)
    return fsdp2_timeline(whole, sharding, collectives="gloo", slices_per_batch=slices), traced


def on_one_device(program: StepProgram, sharding: Sharding) -> StepProgram:
    """The step that a rank's is derived from: in the dtypes of the policy."""
    return replace(program, group_precision=sharding.group_precision)


HIDDEN = ("fsdp.chunk_cat", "fsdp.add_to_sums")


def without_copies_of_gradients(timeline: Timeline) -> Timeline:
    """Without what a trace without operator probes cannot see.

    Gradients are filled up to whole rows in front of the exchange; those that are added to others of another dtype are
    cast first.
    """
    hidden = {
        output.storage
        for event in timeline.events
        if isinstance(event, Operation) and event.op in HIDDEN
        for output in event.outputs
    }
    events = (e for e in timeline.events if not isinstance(e, Operation) or e.op not in HIDDEN)
    return replace(timeline, events=tuple(e for e in events if not isinstance(e, Free) or e.storage not in hidden))


def alive_at_the_end(timeline: Timeline) -> int:
    alive = {resident.storage: resident.allocated_bytes for resident in timeline.residents}
    for event in timeline.events:
        if isinstance(event, Free):
            alive.pop(event.storage, None)
        else:
            alive.update((output.storage, output.allocated_bytes) for output in event.outputs)
    return sum(alive.values())


def test_every_rank_count_and_setting_gives_the_peaks_of_torchs_own_engine() -> None:
    for ranks, settings_, more in (
        (2, {}, {}),
        (3, {}, {"slices": 2}),
        (8, {"reshard_after_forward": False}, {"slices": 3}),
        (64, {}, {"slices": 2, "recomputed": True}),
        (1000, {}, {"accumulate": 2}),
        (2, {"synchronisation": "step"}, {"slices": 3}),
        (4, {"synchronisation": "step"}, {"slices": 2, "accumulate": 2, "recomputed": True}),
        (1, {}, {}),
    ):
        step = program()
        derived, traced = both(step, spread(step, ranks, **settings_), **more)
        assert peaks(without_copies_of_gradients(derived)).by_phase == peaks(traced).by_phase, (ranks, settings_, more)
        assert alive_at_the_end(derived) == alive_at_the_end(traced), (ranks, settings_, more)


BF16: dict[str, Any] = {"param_dtype": "bfloat16"}
SUMS_IN_32: dict[str, Any] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


@pytest.mark.parametrize(
    ("ranks", "settings_", "more"),
    [
        (2, SUMS_IN_32, {}),
        (2, BF16, {}),
        (3, SUMS_IN_32, {"slices": 2}),
        (3, BF16, {"slices": 2, "recomputed": True}),
        (8, SUMS_IN_32 | {"reshard_after_forward": False}, {"slices": 3}),
        (64, SUMS_IN_32, {"slices": 2, "accumulate": 2}),
        (64, BF16, {"slices": 2, "recomputed": True, "accumulate": 2}),
        (2, SUMS_IN_32 | {"synchronisation": "step"}, {"slices": 3}),
        (2, BF16 | {"synchronisation": "step"}, {"slices": 3}),
        (4, SUMS_IN_32 | {"synchronisation": "step"}, {"slices": 2, "accumulate": 2, "recomputed": True}),
        (1, SUMS_IN_32, {}),
        (3, {"reduce_dtype": "bfloat16"}, {"slices": 2}),
        (3, {"reduce_dtype": "bfloat16", "synchronisation": "step"}, {"slices": 2}),
        (2, SUMS_IN_32 | {"output_dtype": "float32"}, {"slices": 2}),
        (2, BF16 | {"output_dtype": "float32"}, {"recomputed": True}),
    ],
    ids=str,
)
def test_a_policy_gives_the_peaks_of_torchs_own_engine(
    ranks: int, settings_: dict[str, Any], more: dict[str, Any]
) -> None:
    step = program()
    derived, traced = both(step, spread(step, ranks, **settings_), **more)
    assert peaks(without_copies_of_gradients(derived)).by_phase == peaks(traced).by_phase
    assert alive_at_the_end(derived) == alive_at_the_end(traced)


def test_the_state_of_a_generator_is_counted_a_moment_early() -> None:
    step = program()
    derived, traced = both(step, spread(step, 64, **SUMS_IN_32), slices=2, recomputed=True)
    early = torch.get_rng_state().numel()
    assert peaks(derived).peak_allocated_bytes - peaks(traced).peak_allocated_bytes in (0, early)


def on_inputs(loss: Callable[[nn.Module, Tensor], Tensor], network: nn.Module) -> StepProgram:
    return program_of(network, loss=lambda net, x: loss(net(x), x), optimizer=SGD)


class WithBuffers(nn.Module):
    """Floating inputs, buffers that stay as they are, an output that is promoted by one, and a loss in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(48, 24)
        self.blocks = nn.ModuleList(Block(24) for _ in range(3))
        self.norm = nn.BatchNorm1d(24)
        self.register_buffer("scale", torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.scale  # bfloat16 times float32

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.forward(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


class CallsItself(WithBuffers):
    """Its step calls the root by its hooks, which torch counts as a forward of its own."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()


def of_rows(step: StepProgram, sharding: Sharding) -> tuple[Timeline, Timeline]:
    """The step of one rank on rows of floating numbers: derived, and traced."""
    trace = partial(trace_window, batch=torch.zeros(64, 48), collect_signatures=False, steps=False)
    whole = trace(on_one_device(step, sharding))
    return fsdp2_timeline(whole, sharding, collectives="gloo"), trace(step, sharding=sharding)


@pytest.mark.parametrize("policy", [SUMS_IN_32, BF16, SUMS_IN_32 | {"output_dtype": "float32"}], ids=str)
@pytest.mark.parametrize("by_step", [True, False], ids=["training_step", "forward"])
def test_inputs_are_cast_and_buffers_are_not(policy: dict[str, Any], by_step: bool) -> None:
    network = WithBuffers()
    step = program_of(network) if by_step else on_inputs(lambda y, x: y.float().square().mean(), network)
    derived, traced = of_rows(step, spread(step, 2, **policy))
    assert peaks(without_copies_of_gradients(derived)).by_phase == peaks(traced).by_phase
    assert alive_at_the_end(derived) == alive_at_the_end(traced)


def test_a_step_that_calls_its_own_module_is_said_to_need_no_less() -> None:
    step = program_of(CallsItself())
    derived, traced = of_rows(step, spread(step, 2, **SUMS_IN_32))
    block = 2 * (24 * 72 + 72 + 72 * 24 + 24 + 2 * 24)  # torch fetches none ahead for the second root
    assert peaks(derived).peak_allocated_bytes >= peaks(traced).peak_allocated_bytes
    assert peaks(derived).by_phase["backward"] - peaks(traced).by_phase["backward"] <= block


@settings(max_examples=6, deadline=None)
@given(
    ranks=st.integers(1, 12), words=st.integers(5, 60), width=st.integers(3, 40), depth=st.integers(2, 3),
    slices=st.sampled_from((1, 2, 3)), reshard=st.booleans(), recomputed=st.booleans(),
)  # fmt: skip
def test_any_small_model_gives_the_peaks_of_torchs_own_engine(
    ranks: int, words: int, width: int, depth: int, slices: int, reshard: bool, recomputed: bool
) -> None:
    step = program(words, width, depth)
    sharding = spread(step, ranks, reshard_after_forward=reshard)
    derived, traced = both(step, sharding, slices=slices, recomputed=recomputed)
    wanted, found = peaks(traced), peaks(without_copies_of_gradients(derived))
    assert found.peak_allocated_bytes == pytest.approx(wanted.peak_allocated_bytes, rel=0.002)


def test_a_loss_within_the_root_is_told_apart_from_one_outside() -> None:
    for in_root in (True, False):
        network = Net(4000, 24, 3)
        step = program_of(Around(network)) if in_root else program_of(network, loss=next_word, optimizer=SGD)
        sharding = spread(step, 4)
        whole = trace_window(step, torch.zeros(2, 16, dtype=torch.long), steps=False, collect_signatures=False)
        derived, traced = both(step, sharding, samples=2)
        assert peaks(derived).by_phase == peaks(traced).by_phase
        # Where nothing tells whether the root was called, more is counted and not less.
        untold = fsdp2_timeline(replace(whole, calls_root=None), sharding, collectives="gloo")
        assert peaks(untold).peak_allocated_bytes >= peaks(traced).peak_allocated_bytes


class Normalised(Net):
    """Its forward ends with an operator of its own, on the largest of its tensors."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.log_softmax(super().forward(ids), dim=-1)


def test_the_roots_forward_ends_with_its_last_operator_whatever_module_that_belongs_to() -> None:
    step = program_of(Normalised(4000, 24, 3), loss=lambda net, ids: net(ids).mean(), optimizer=SGD)
    derived, traced = both(step, spread(step, 4), samples=2)
    assert peaks(derived).by_phase == peaks(traced).by_phase


def test_a_root_that_is_a_module_inside_leaves_what_is_around_it_alone() -> None:
    step = program_of(Around(Net(50, 16, 2)))
    sharding = spread(step, 4, shard_groups=("net.blocks.0", "net.blocks.1", "net"))
    derived, traced = both(step, sharding)
    assert peaks(derived).by_phase == peaks(traced).by_phase


def linear_of_two() -> tuple[Timeline, Sharding]:
    """Two blocks of one 8 x 8 matrix and nothing else, on one sample."""
    module = nn.Sequential(nn.Sequential(nn.Linear(8, 8, bias=False)), nn.Sequential(nn.Linear(8, 8, bias=False)))
    step = program_of(module, loss=lambda network, x: network(x).sum(), optimizer=SGD)
    timeline = trace_window(step, torch.zeros(1, 8), steps=False, collect_signatures=False)
    return timeline, Sharding(engine="fsdp2", ranks=4, synchronisation="slice", shard_groups=("0", "1", ""))


def exchanged(timeline: Timeline) -> list[tuple[str, str, str, int]]:
    """What the engine allocated: operator, group, phase, bytes."""
    return [
        (event.op, event.module, event.phase, event.outputs[0].allocated_bytes)
        for event in timeline.events
        if isinstance(event, Operation) and event.op.startswith(("fsdp", "gloo"))
    ]


def test_what_is_gathered_and_reduced_is_as_worked_out_by_hand() -> None:
    timeline, sharding = linear_of_two()
    # A matrix of 8 x 8 float32 is 256 bytes, its share over 4 ranks 2 rows of 32 bytes: 64.
    assert exchanged(fsdp2_timeline(timeline, sharding)) == [
        ("fsdp.all_gather", "0", "forward", 256),
        ("fsdp.split_with_sizes_copy", "0", "forward", 256),
        ("fsdp.all_gather", "1", "forward", 256),
        ("fsdp.split_with_sizes_copy", "1", "forward", 256),
        # The root has no parameters of its own, so that it gathers block 1 ahead for the backward.
        ("fsdp.all_gather", "1", "backward", 256),
        ("fsdp.split_with_sizes_copy", "1", "backward", 256),
        ("fsdp.all_gather", "0", "backward", 256),
        ("fsdp.reduce_scatter", "1", "backward", 256),
        ("fsdp.reduce_scatter", "1", "backward", 64),
        ("fsdp.split_with_sizes_copy", "0", "backward", 256),
        ("fsdp.reduce_scatter", "0", "backward", 256),
        ("fsdp.reduce_scatter", "0", "backward", 64),
    ]


def test_under_a_policy_it_is_as_worked_out_by_hand() -> None:
    timeline, sharding = linear_of_two()
    # 64 elements: gathered in 2 bytes each, of which the rank casts its quarter; added up in 4 or 2, a share of 16 of
    # which stays in 4.
    sums = exchanged(fsdp2_timeline(timeline, replace(sharding, **SUMS_IN_32)))
    forward = [("fsdp.cast", 32), ("fsdp.all_gather", 128), ("fsdp.split_with_sizes_copy", 128)]
    assert [(op, size) for op, _, phase, size in sums if phase == "forward"] == 2 * forward
    reduced = [size for op, _, _, size in sums if op == "fsdp.reduce_scatter"]
    assert reduced == 2 * [256, 64]
    halves = exchanged(fsdp2_timeline(timeline, replace(sharding, **BF16)))
    reduced = [size for op, _, _, size in halves if op == "fsdp.reduce_scatter"]
    assert reduced == 2 * [128, 32]
    backward = [size for op, _, phase, size in halves if op == "fsdp.cast" and phase == "backward"]
    assert backward == [32, 32, 64, 64]  # two gatherings, and two shares of the sums in their own dtype


def test_a_host_copies_gradients_once_more_where_they_are_added_up_in_another_dtype() -> None:
    timeline, sharding = linear_of_two()
    for ranks, policy, copied in (
        (4, SUMS_IN_32, 128),  # of 64 elements, in the 2 bytes in which they come
        (4, BF16, 0),
        (3, SUMS_IN_32, 2 * 144),  # 9 rows of 8 in place of 8: filled up, and that copied
        (3, BF16, 144),
    ):
        spread = replace(sharding, ranks=ranks, **policy)
        found = exchanged(fsdp2_timeline(timeline, spread, collectives="gloo"))
        assert [size for op, _, _, size in found if op == "fsdp.chunk_cat"] == [copied] * 2 * bool(copied)
        assert not any(op == "fsdp.chunk_cat" for op, *_ in exchanged(fsdp2_timeline(timeline, spread)))


def test_gradients_that_wait_are_cast_and_later_ones_added_to_them() -> None:
    _, sharding = linear_of_two()
    module = nn.Sequential(nn.Sequential(nn.Linear(8, 8, bias=False)), nn.Sequential(nn.Linear(8, 8, bias=False)))
    step = program_of(module, loss=lambda network, x: network(x).sum(), optimizer=SGD)
    waits = replace(sharding, synchronisation="step", **SUMS_IN_32)
    window = trace_window(
        on_one_device(step, waits), torch.zeros(2, 8), divide=lambda rows: rows.split(1), steps=False
    )  # fmt: skip
    for collectives, cast in (("gloo", [256, 256]), ("nccl", [])):  # 64 elements in 4 bytes
        found = exchanged(fsdp2_timeline(window, waits, collectives=collectives))  # type: ignore[arg-type]
        assert [size for op, _, _, size in found if op == "fsdp.wait"] == [256, 256]
        assert [size for op, _, _, size in found if op == "fsdp.add_to_sums"] == cast


def test_gloo_takes_a_copy_of_what_it_moves_and_nccl_takes_none() -> None:
    timeline, sharding = linear_of_two()
    inside = [
        size for op, _, _, size in exchanged(fsdp2_timeline(timeline, sharding, collectives="gloo")) if op == "gloo"
    ]
    # Two gatherings in the forward, two in the backward, and two sums, with 12 bytes for the division by 4 ranks.
    assert Counter(inside) == Counter({256: 4, 268: 2})


def test_a_rank_holds_its_share_of_parameters_and_gradients() -> None:
    timeline, sharding = linear_of_two()
    for ranks, share in ((4, 64), (3, 96), (8, 32), (100, 32)):  # 8 rows over 3 ranks: 3 of 32 bytes; over 100: one
        derived = fsdp2_timeline(timeline, replace(sharding, ranks=ranks))
        held = Counter(dict.fromkeys(("parameters", "gradients"), 0))
        for resident in derived.residents:
            held[resident.category] += resident.allocated_bytes
        assert held["parameters"] == held["gradients"] == 2 * share
        assert [layout.size for layout in derived.parameters] == [(share // 32, 8)] * 2


def test_the_optimizers_step_over_shares_takes_the_place_of_the_whole_one() -> None:
    timeline, sharding = linear_of_two()
    shares = nn.ParameterList(nn.Parameter(torch.zeros(2, 8)) for _ in range(2))
    step = trace_optimizer_step(program_of(shares, loss=lambda module, x: x, optimizer=SGD))
    derived = fsdp2_timeline(timeline, sharding, step)
    assert sum(r.allocated_bytes for r in derived.residents if r.category == "optimizer_states") == 2 * 64


@pytest.mark.parametrize("make", [lambda: Sharding(engine="ddp", ranks=2)])
def test_another_engine_is_refused(make: Callable[[], Sharding]) -> None:
    with pytest.raises(UnsupportedError, match="DDP over 2 is not FSDP2"):
        fsdp2_timeline(linear_of_two()[0], make())


def test_a_parameter_that_is_a_single_number_is_refused_as_torch_refuses_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    step = program_of(Scaled(), loss=lambda module, x: module(x).sum(), optimizer=SGD)
    timeline = trace_window(step, torch.zeros(2), steps=False)
    with pytest.raises(UnsupportedError, match=r"scale is a single number. Give it one dimension: torch.zeros\(1\)."):
        fsdp2_timeline(timeline, Sharding(engine="fsdp2", ranks=2, shard_groups=("",)))


def test_a_timeline_that_does_not_tell_its_parameters_is_refused() -> None:
    timeline, sharding = linear_of_two()
    with pytest.raises(UnsupportedError, match="does not tell its parameters"):
        fsdp2_timeline(replace(timeline, parameters=()), sharding)


@pytest.mark.parametrize("policy", [{}, SUMS_IN_32, BF16 | {"output_dtype": "float32"}], ids=str)
@pytest.mark.parametrize("in_root", [True, False])
def test_a_step_derived_from_a_record_gives_the_peak_of_torchs_own_engine(
    in_root: bool, policy: dict[str, Any]
) -> None:
    network = Net(300, 24, 3)
    step = program_of(Around(network)) if in_root else program_of(network, loss=next_word, optimizer=SGD)
    blocks = find_repeated_blocks(step.module)
    ids = torch.zeros(6, 16, dtype=torch.long)
    record = record_window(
        on_one_device(step, spread(step, 4, **policy)),
        ids,
        slices_of=lambda batch: (batch, split_by_sizes(batch, (3, 3))[0]),
        samples=(6, 3),
        blocks=blocks,
        collect_signatures=False,
    )
    for recomputed in ((), blocks):
        variant = Variant(slice_sizes=(2, 2, 2), recomputed=recomputed)
        sharding = spread(step, 4, **policy)
        window = StepVariants(record).timeline(variant)
        derived = fsdp2_timeline(window, sharding, collectives="gloo", slices_per_batch=3)
        _, traced = both(step, sharding, slices=3, recomputed=bool(recomputed))
        assert peaks(derived).by_phase == peaks(traced).by_phase


def with_frozen(*beginnings: str) -> StepProgram:
    """A step in which the parameters whose names begin so are not trained."""
    network = Net(101, 24, 3)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not name.startswith(beginnings))
    return program_of(
        network, loss=next_word, optimizer=lambda parameters: SGD([each for each in parameters if each.requires_grad])
    )


class CalledTwice(Net):
    """All blocks, and all of them again."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class WithoutStem(nn.Module):
    """The first block is given what has no gradient, so that nothing tells that its backward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(24) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.float()[..., None].expand(*ids.shape, 24)
        for block in self.blocks:
            x = block(x)
        return x


UNUSUAL: dict[str, Callable[[], StepProgram]] = {
    "embeddings and a block frozen": lambda: with_frozen("embed", "blocks.0"),
    "a block in the middle frozen": lambda: with_frozen("blocks.1"),
    "blocks called twice": lambda: program_of(CalledTwice(101, 24, 2), loss=next_word, optimizer=SGD),
    "no parameters in the root": lambda: program_of(
        WithoutStem(), loss=lambda net, ids: net(ids).square().mean(), optimizer=SGD
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_not_trained_or_called_more_than_once_is_told_too(name: str) -> None:
    step = UNUSUAL[name]()
    derived, traced = both(step, spread(step, 4), slices=2)
    assert peaks(derived).by_phase == peaks(traced).by_phase
    assert alive_at_the_end(derived) == alive_at_the_end(traced)


def test_a_block_that_is_called_several_times_in_a_row_is_said_to_need_no_less() -> None:
    class InARow(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(block(block(x)))
            return self.head(x)

    step = program_of(InARow(101, 24, 2), loss=next_word, optimizer=SGD)
    derived, traced = both(step, spread(step, 4), slices=2, recomputed=True)
    block = 4 * (24 * 72 + 72 + 72 * 24 + 24 + 2 * 24)  # what is gathered of one
    assert 0 <= peaks(derived).peak_allocated_bytes - peaks(traced).peak_allocated_bytes <= block
