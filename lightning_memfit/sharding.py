"""How training is spread over devices: by whom, who holds what, and what is exchanged when. Frozen, plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_memfit.errors import ConfigurationError

Engine = Literal["ddp", "deepspeed", "fsdp2"]
ZeroStage = Literal[1, 2, 3]
Synchronisation = Literal["step", "slice"]
PolicyDtype = Literal["float32", "bfloat16"]
"""torch's name of a dtype that a mixed-precision policy of ``fully_shard`` asks for."""

_ZERO_ONLY = (
    "zero_stage", "reduce_bucket_elements", "allgather_bucket_elements", "prefetch_bucket_elements",
    "persistence_threshold_elements", "overlap_communication",
)  # fmt: skip
_POLICY = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True, kw_only=True)
class GroupPrecision:
    """The dtypes of forward and backward in the groups of ``fully_shard``, where they are not the parameters' own."""

    groups: tuple[str, ...]
    """Qualified names of the modules that it was called on, ``""`` for the root."""
    param_dtype: PolicyDtype | None = None
    """Of gathered parameters, of what is given to a group, and so of whole gradients; ``None`` is their own."""
    output_dtype: PolicyDtype | None = None
    """Of what a group returns; ``None`` leaves it as it is."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """One way to spread training over several devices; every rank holds an equal share of what is divided."""

    engine: Engine
    """Who divides and exchanges: torch's DDP, DeepSpeed (ZeRO), or torch's ``fully_shard`` (FSDP2)."""
    ranks: int
    """Devices over which it is spread, one process each."""
    synchronisation: Synchronisation = "step"
    """When gradients are exchanged: once per optimizer step, or after every slice."""
    gradient_as_bucket_view: bool = False
    """DDP: gradients are views of the buckets that are exchanged, instead of tensors beside them."""
    zero_stage: ZeroStage | None = None
    """DeepSpeed: 1 divides optimizer states, 2 gradients too, 3 parameters too."""
    reduce_bucket_elements: int | None = None
    """DeepSpeed: elements of gradients that are reduced at once."""
    allgather_bucket_elements: int | None = None
    """DeepSpeed: elements of parameters that are gathered at once, in stages 1 and 2."""
    prefetch_bucket_elements: int | None = None
    """DeepSpeed, stage 3: elements of parameters that are fetched ahead."""
    persistence_threshold_elements: int | None = None
    """DeepSpeed, stage 3: parameters of at most as many elements are held whole by every rank."""
    overlap_communication: bool | None = None
    """DeepSpeed: gradients are reduced while the backward goes on; in stages 1 and 2 with a second bucket."""
    shard_groups: tuple[str, ...] = ()
    """FSDP2: qualified names of the modules whose parameters are gathered together, ``""`` for the root."""
    reshard_after_forward: bool = True
    """FSDP2: whether gathered parameters are let go after the forward and gathered again in the backward."""
    param_dtype: PolicyDtype | None = None
    """FSDP2, ``MixedPrecisionPolicy``: dtype that parameters are gathered and computed in; ``None`` is their own."""
    reduce_dtype: PolicyDtype | None = None
    """FSDP2, ``MixedPrecisionPolicy``: dtype that gradients are added up in; ``None`` is that of the computation."""
    output_dtype: PolicyDtype | None = None
    """FSDP2, ``MixedPrecisionPolicy``: dtype that outputs of the groups are cast to; ``None`` leaves them."""

    def __post_init__(self) -> None:
        """Check that the settings belong to the engine.

        Raises:
            ConfigurationError: naming the setting and the engine.
        """
        if self.ranks < 1:
            raise ConfigurationError(f"ranks={self.ranks} must be at least 1 device.")
        if (self.engine == "deepspeed") != (self.zero_stage is not None):
            raise ConfigurationError(
                f"engine={self.engine!r} with zero_stage={self.zero_stage}: DeepSpeed, and only DeepSpeed, has a stage."
            )
        for name in _ZERO_ONLY:
            if self.engine != "deepspeed" and getattr(self, name) is not None:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)} is a setting of DeepSpeed, not of {self.engine}."
                )
        if self.shard_groups and self.engine != "fsdp2":
            raise ConfigurationError(f"shard_groups={self.shard_groups} are a setting of FSDP2, not of {self.engine}.")
        for name in _POLICY:
            if self.engine != "fsdp2" and getattr(self, name) is not None:
                raise ConfigurationError(f"{name}={getattr(self, name)} is a setting of FSDP2, not of {self.engine}.")
            if getattr(self, name) not in (None, *get_args(PolicyDtype)):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} of a mixed-precision policy is not forecast: float16 needs a loss "
                    f"that is scaled, which nothing does there. Use one of {', '.join(get_args(PolicyDtype))}, or None."
                )
        if self.gradient_as_bucket_view and self.engine != "ddp":
            raise ConfigurationError(f"gradient_as_bucket_view is a setting of DDP, not of {self.engine}.")

    @property
    def label(self) -> str:
        """A few words for tables, such as ``"ZeRO-2 over 8"``."""
        name = {"ddp": "DDP", "fsdp2": "FSDP2"}.get(self.engine, f"ZeRO-{self.zero_stage}")
        return f"{name} over {self.ranks}"

    @property
    def has_policy(self) -> bool:
        """Whether a mixed-precision policy of FSDP2 chooses dtypes."""
        return any(getattr(self, name) is not None for name in _POLICY)

    def check_precision(self, precision: str) -> None:
        """Refuse a precision of Lightning's beside a mixed-precision policy: it would be another computation.

        Args:
            precision: in Lightning's words, as the user asked for.

        Raises:
            ConfigurationError: naming both.
        """
        if self.has_policy and precision != "32-true":
            policy = ", ".join(f"{name}={getattr(self, name)}" for name in _POLICY if getattr(self, name) is not None)
            raise ConfigurationError(
                f"precision={precision!r} cannot be had with fully_shard's MixedPrecisionPolicy({policy}): both choose "
                "the dtypes of the computation, and 1 of them may. Leave precision out (it is '32-true' then, and the "
                "policy decides), or the policy."
            )

    @property
    def group_precision(self) -> GroupPrecision | None:
        """The dtypes in which modules compute, if a policy chooses them; what reduces gradients is not among them."""
        if self.param_dtype is None and self.output_dtype is None:
            return None
        return GroupPrecision(groups=self.shard_groups, param_dtype=self.param_dtype, output_dtype=self.output_dtype)
