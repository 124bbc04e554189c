"""What plans and forecasts need where an engine spreads a step: ranks of a candidate, the host, notes."""

from __future__ import annotations

from dataclasses import replace

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan import Candidate, Offload, Plan
from lightning_memfit.search.strategies import Considered
from lightning_memfit.sharding import Sharding
from lightning_memfit.units import parse_bytes


def on_ranks(candidate: Candidate, sharding: Sharding | None, offload: Offload) -> Candidate:
    """A candidate for one device, spread over several; its batch is that of one rank.

    Raises:
        ConfigurationError: if something is to be offloaded that the engine does not offload, or the candidate has a
            precision beside a mixed-precision policy.
    """
    if offload != "never" and (sharding is None or sharding.engine != "deepspeed"):
        raise ConfigurationError(
            f"offload={offload!r} is forecast for DeepSpeed alone. Give sharding=Sharding(engine='deepspeed', "
            "ranks=..., zero_stage=...), or offload='never'."
        )
    if offload == "parameters" and sharding is not None and sharding.zero_stage != 3:
        raise ConfigurationError(
            f"offload='parameters' with zero_stage={sharding.zero_stage}: DeepSpeed divides parameters, and keeps them "
            "on the host, in stage 3 alone. Give zero_stage=3, or offload='optimizer'."
        )
    if sharding is None:
        return candidate
    sharding.check_precision(candidate.precision)
    split = candidate.split
    ranked = replace(split, ranks=sharding.ranks, effective_batch_size=split.effective_batch_size * sharding.ranks)
    return replace(candidate, sharding=sharding, offload=offload, split=ranked)


_CROSSES = {
    "optimizer": "gradients and new parameters cross PCI Express",
    "parameters": "gradients, and parameters in every forward and backward, cross PCI Express",
}


def host_bytes_of(host_memory: int | str | None) -> int | None:
    """Bytes of the host that all ranks of a node may use; ``None`` where that is not known.

    Raises:
        ConfigurationError: if it is no number of bytes.
    """
    if host_memory is None:
        return None
    if isinstance(host_memory, str):
        return parse_bytes(host_memory, setting="host_memory")
    if isinstance(host_memory, bool) or not isinstance(host_memory, int) or host_memory < 0:
        raise ConfigurationError(f"host_memory={host_memory!r} must be bytes, text such as '1TiB', or None.")
    return host_memory


def notes_on_devices(plan: Plan, considered: Considered) -> tuple[str, ...]:
    """What the user should know of a plan for several devices; on one, of what is, or could not be, offloaded."""
    candidate, device = plan.candidate, plan.device
    notes = [f"not considered: {each}" for each in considered.left_out]
    if candidate.sharding is None:
        return tuple(notes)
    if candidate.sharding.ranks == 1:
        notes.append(
            "train it with Lightning's DeepSpeedStrategy (choose_strategy makes it): a Trainer by itself offloads "
            "nothing"
        )
    elif device.link_bytes_per_second is None:
        notes.append(
            f"how fast {device.name} sends to others of its node is not known: strategies are ranked by the bytes that "
            "they exchange, and seconds leave the exchange out"
        )
    else:
        notes.append(
            f"seconds count what ranks send at {device.link_bytes_per_second / 1e9:g} GB/s, the vendor's figure within "
            "a node in one direction, as if nothing ran beside it; no exchange was timed"
        )
    if candidate.offload != "never":
        notes.append(
            f"seconds leave out what offloading costs: {_CROSSES[candidate.offload]}, and the host steps the optimizer"
        )
    if candidate.sharding.engine == "fsdp2":
        notes.append(
            "FSDP2 shards what configure_model shards: call lightning_memfit.fully_shard there, with "
            "mesh=self.device_mesh['data_parallel']"
        )
    return tuple(notes)
