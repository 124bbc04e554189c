"""One rank of a case: real steps with the real engine, and the exact peak of the steady state.

    python -m benchmarks.accuracy_ranks_case "LABEL" --rank 0 --store FILE --library PATH

Started by ``benchmarks.accuracy_ranks`` once for each rank. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.allocator.budget_allocator import BudgetAllocator
from benchmarks.rank_cases import RankCase, build, fsdp2_sharding, select_cases, slices_of
from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.trace.training_step import Unobserved, run_window

STEPS = 17
"""The first creates the optimizer's states and the engine's buffers; of those after it the lowest peak counts.

gloo's threads let go of a buffer some time after the exchange is done. Where the next allocation is faster, a step
holds both, which none does by itself.
"""

AroundSlice = Callable[[bool], AbstractContextManager[None]]
"""(whether it is the last of its batch) to the context of one slice."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("label", help="of the case")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True, help="a file by which the ranks find each other")
    parser.add_argument("--library", type=Path, required=True, help="the built allocator")
    chosen = parser.parse_args(arguments)
    (case,) = select_cases(chosen.label)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    allocator = BudgetAllocator(chosen.library)
    allocator.install()
    store = dist.FileStore(str(chosen.store), case.ranks)
    dist.init_process_group("gloo", store=store, rank=chosen.rank, world_size=case.ranks)
    try:
        print(json.dumps({"rank": chosen.rank, "measured_peak_bytes": measure(case, allocator)}), flush=True)
    finally:
        dist.destroy_process_group()


def measure(case: RankCase, allocator: BudgetAllocator) -> int:
    """Most bytes alive in a step in the steady state, above what was alive before the module was built."""
    gc.collect()
    before = allocator.live_bytes
    network, batch, program = build(case)
    around = SPREADING[case.engine](case, network)
    if case.recomputed:
        checkpoint_modules(network, find_repeated_blocks(network))
    optimizer = program.make_optimizer()
    slices = slices_of(case, batch) * case.accumulate
    peaks = []
    for _ in range(STEPS):
        gc.collect()
        allocator.reset_peak()
        run_window(
            program,
            optimizer,
            slices,
            Unobserved(),
            around_slice=lambda index: around((index + 1) % case.slices == 0),
        )
        peaks.append(allocator.peak_bytes - before)
    return min(peaks[1:])


def _spread_by_fsdp2(case: RankCase, network: nn.Module) -> AroundSlice:
    from lightning_memfit.apply.fsdp2 import Fsdp2Exchange
    from lightning_memfit.sharded_model import fully_shard, policy_of

    sharding = fsdp2_sharding(case, network)
    policy = policy_of(sharding)
    fully_shard(network, reshard_after_forward=sharding.reshard_after_forward, mixed_precision=policy)
    exchange = Fsdp2Exchange(network, synchronisation=sharding.synchronisation)
    return lambda is_last: exchange.around_slice(is_last=is_last)


SPREADING: Mapping[str, Callable[[RankCase, nn.Module], AroundSlice]] = {"fsdp2": _spread_by_fsdp2}
"""By engine: spreads the network over the ranks, and tells what each slice runs within."""


if __name__ == "__main__":
    main()
