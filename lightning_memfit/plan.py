"""The vocabulary: what is asked for, what was chosen, why, and what was measured. Frozen values, schema version 1.

The schema holds every lever of the design, also those that this release cannot choose yet, so that later releases
add values and not shapes. Nothing here imports Lightning, OmegaConf or ``torch.cuda``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from lightning_memfit.errors import BatchArithmeticError, ConfigurationError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.measurement import Measurement as Measurement
from lightning_memfit.measurement import OperatorCost as OperatorCost
from lightning_memfit.measurement import OptimizerStatesMeasurement as OptimizerStatesMeasurement
from lightning_memfit.measurement import TimedPlan as TimedPlan
from lightning_memfit.plan_file import plain_data
from lightning_memfit.sharding import Sharding as Sharding

SCHEMA_VERSION = 1

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]
Checkpointing = Literal["none", "blocks", "patterns"]
OptimizerStates = Literal["as-configured", "8bit"]
OptimizerImplementation = Literal["as-configured", "single-tensor", "foreach", "fused", "cpu-adam"]
Offload = Literal["never", "optimizer", "parameters"]
LossWeightWord = Literal["samples", "tokens", "next-tokens", "sum"]
Mode = Literal["apply", "report", "off"]
OnNoFit = Literal["raise", "skip", "value"]
Category = Literal[
    "parameters", "buffers", "gradients", "optimizer_states", "activations", "temporaries", "inputs", "callbacks",
    "communication",
]  # fmt: skip
Phase = Literal["forward", "zero_grad", "backward", "gradient_clipping", "optimizer_step", "evaluation"]
Method = Literal["traced", "extrapolated", "floor"]

_CHECKPOINTING_WORDS = ("auto", "none", "blocks")
_ASKED_IMPLEMENTATIONS = ("auto", "as-configured", "single-tensor", "foreach", "fused")
CATEGORIES: tuple[Category, ...] = get_args(Category)
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the user asks for. Checked once, when it is made."""

    effective_batch_size: int | None = None
    """Samples per optimizer step over all ranks; ``None`` keeps what the run does today."""
    budget: int | None = None
    """Bytes a plan may use; ``None`` means what the device leaves."""
    headroom: int | None = None
    """Bytes left free on purpose; ``None`` means the default of the device."""
    precision: Precision | None = None
    """Pinned precision; ``None`` leaves the choice to MemFit."""
    activation_checkpointing: Literal["auto", "none", "blocks"] | tuple[str, ...] = "auto"
    """``"auto"``, ``"none"``, ``"blocks"``, or patterns of module names (as in ``fnmatch``)."""
    optimizer_states: Literal["auto", "as-configured", "8bit"] = "auto"
    """Format of the optimizer's states."""
    offload: Literal["never", "auto", "optimizer", "parameters"] = "never"
    """What may be kept on the host."""
    micro_batch_size: int | None = None
    """Pinned size of the largest slice in samples; ``None`` leaves the choice to MemFit."""
    optimizer_implementation: Literal["auto", "as-configured", "single-tensor", "foreach", "fused"] = "auto"
    """Implementation of the optimizer's step."""
    loss_weight: str = "samples"
    """What a slice's loss is weighted by: a :data:`LossWeightWord`, or the name of the user's function."""
    max_length: int | None = None
    """Longest sequence in tokens that may occur."""
    allow_inexact_slicing: bool = False
    """Slice also where the result differs from that of the undivided batch."""
    mode: Mode = "apply"
    """``"apply"``, ``"report"`` (plan and print, change nothing) or ``"off"``."""
    on_no_fit: OnNoFit = "raise"
    """What to do if nothing fits."""
    num_profiled_steps: int = 2
    """Optimizer steps of the memory warm-up, at least 2 so that lazily created states exist."""
    planning_seconds: float | None = None
    """Upper limit of planning time in seconds."""

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigurationError: with the setting, its value and the choices.
        """
        _check_count("effective_batch_size", self.effective_batch_size)
        _check_count("micro_batch_size", self.micro_batch_size)
        _check_count("max_length", self.max_length)
        _check_count("budget", self.budget)
        _check_count("headroom", self.headroom, least=0)
        _check_choice("precision", self.precision, (None, *get_args(Precision)))
        asked = self.activation_checkpointing
        if isinstance(asked, str) and asked not in _CHECKPOINTING_WORDS:
            raise ConfigurationError(
                f"activation_checkpointing={asked!r} is not known. Choose one of: 'auto', 'none', "
                "'blocks', or a list of patterns of module names such as ['blocks.*']."
            )
        _check_choice("optimizer_states", self.optimizer_states, ("auto", *get_args(OptimizerStates)))
        _check_choice("offload", self.offload, ("auto", *get_args(Offload)))
        _check_choice("optimizer_implementation", self.optimizer_implementation, _ASKED_IMPLEMENTATIONS)
        _check_choice("allow_inexact_slicing", self.allow_inexact_slicing, (True, False))
        _check_choice("mode", self.mode, get_args(Mode))
        _check_choice("on_no_fit", self.on_no_fit, get_args(OnNoFit))
        if isinstance(self.num_profiled_steps, bool) or not isinstance(self.num_profiled_steps, int):
            raise ConfigurationError(f"num_profiled_steps={self.num_profiled_steps!r} must be an int of at least 2.")
        if self.num_profiled_steps < 2:
            raise ConfigurationError(
                f"num_profiled_steps={self.num_profiled_steps} is too few: optimizers create their states in the first "
                "step, so that only the second shows the whole peak. Use 2 or more."
            )
        seconds = self.planning_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float, NoneType)):
            raise ConfigurationError(f"planning_seconds={seconds!r} must be a number of seconds, or be left out.")
        if seconds is not None and not seconds > 0:
            raise ConfigurationError(f"planning_seconds={seconds!r} must be more than 0 seconds.")


def _check_count(setting: str, value: object, *, least: int = 1) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{setting}={value!r} must be a whole number of at least {least}, or be left out.")


def _check_choice(setting: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        shown = ", ".join("'auto'" if choice is None else repr(choice) for choice in choices)
        raise ConfigurationError(f"{setting}={value!r} is not known. Choose one of: {shown}.")


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How one optimizer step is divided: ``effective_batch_size = ranks x accumulate_grad_batches x loader batch``."""

    effective_batch_size: int
    """Samples per optimizer step over all ranks."""
    ranks: int = 1
    """Devices that each take a share."""
    loader_batch_size: int
    """Samples per Lightning batch on one rank."""
    accumulate_grad_batches: int = 1
    """Lightning batches per optimizer step."""
    slice_sizes: tuple[int, ...]
    """Samples of each slice of one Lightning batch, largest first."""

    def __post_init__(self) -> None:
        """Check the products.

        Raises:
            BatchArithmeticError: if the parts do not multiply back to the whole.
        """
        product = self.ranks * self.accumulate_grad_batches * self.loader_batch_size
        if product != self.effective_batch_size:
            raise BatchArithmeticError(
                f"effective_batch_size={self.effective_batch_size} is not ranks {self.ranks} x accumulate_grad_batches "
                f"{self.accumulate_grad_batches} x loader batch {self.loader_batch_size} = {product}."
            )
        if sum(self.slice_sizes) != self.loader_batch_size or min(self.slice_sizes, default=0) < 1:
            raise BatchArithmeticError(
                f"slices {self.slice_sizes} do not add up to the loader's batch of {self.loader_batch_size} samples."
            )

    @property
    def micro_batch_size(self) -> int:
        """Samples in the largest forward and backward on one device."""
        return max(self.slice_sizes)

    @property
    def num_slices(self) -> int:
        """Slices per Lightning batch."""
        return len(self.slice_sizes)


def balanced_slices(samples: int, num_slices: int) -> tuple[int, ...]:
    """Divide ``samples`` into ``num_slices`` parts that differ by at most one, largest first.

    >>> balanced_slices(16, 3)
    (6, 5, 5)
    """
    if not 1 <= num_slices <= samples:
        raise BatchArithmeticError(f"{samples} samples cannot be divided into {num_slices} slices of at least 1.")
    small, larger = divmod(samples, num_slices)
    return (small + 1,) * larger + (small,) * (num_slices - larger)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One setting of every lever."""

    precision: Precision
    """Precision in Lightning's words."""
    activation_checkpointing: Checkpointing = "none"
    """What is recomputed instead of saved."""
    checkpointed_modules: tuple[str, ...] = ()
    """Qualified names of the modules that are recomputed."""
    split: BatchSplit
    """How the effective batch is divided."""
    zero_gradients_early: bool = False
    """Gradients are set to ``None`` before the forward instead of after it."""
    optimizer_states: OptimizerStates = "as-configured"
    """Format of the optimizer's states."""
    optimizer_implementation: OptimizerImplementation = "as-configured"
    """Implementation of the optimizer's step; ``"cpu-adam"`` is DeepSpeed's, for one that is kept on the host."""
    offload: Offload = "never"
    """What is kept on the host."""
    sharding: Sharding | None = None
    """How training is spread over several devices; ``None`` on one."""

    @property
    def harm_tier(self) -> int:
        """0: equal up to rounding. 1: quantised optimizer states. 2: offload or ``bf16-true``. 3: both of them."""
        return 2 * (self.offload != "never" or self.precision == "bf16-true") + (self.optimizer_states == "8bit")

    @property
    def kept_on_host(self) -> int:
        """How much is: 0 for nothing, 1 for the optimizer, 2 for it and the parameters."""
        return get_args(Offload).index(self.offload)

    @property
    def label(self) -> str:
        """One line for tables, such as ``"4 slices of <= 4, checkpointing: blocks"``."""
        split = self.split
        parts = [
            "undivided batch" if split.num_slices == 1 else f"{split.num_slices} slices of <= {split.micro_batch_size}"
        ]
        if self.precision != "32-true":
            parts.append(self.precision)
        if self.activation_checkpointing != "none":
            parts.append(f"checkpointing {len(self.checkpointed_modules)} modules")
        if self.zero_gradients_early:
            parts.append("gradients zeroed early")
        if self.optimizer_states != "as-configured":
            parts.append(f"{self.optimizer_states} optimizer states")
        if self.optimizer_implementation != "as-configured":
            parts.append(f"{self.optimizer_implementation} optimizer")
        if self.offload != "never":
            parts.append(f"offload {self.offload}")
        if self.sharding is not None:
            parts.append(self.sharding.label)
            if self.sharding.gradient_as_bucket_view:
                parts.append("gradients as views")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """The peak of one optimizer step and what it consists of. All numbers are bytes of the torch allocator."""

    peak_allocated_bytes: int
    """The most bytes alive at one moment."""
    peak_reserved_bytes: int | None = None
    """The most bytes held by a caching allocator; ``None`` where there is none (a CPU)."""
    minimum_feasible_bytes: int | None = None
    """Smallest capacity in which the run survives; ``None`` where it does not apply."""
    by_category: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each category at the peak; they add up to the peak."""
    by_phase: Mapping[str, int] = field(default_factory=dict)
    """The peak within each phase."""
    peak_phase: Phase | None
    """The phase in which the peak occurs; ``None`` where only its size is known."""
    peak_op: str | None = None
    """The operator at the peak, such as ``"aten._log_softmax_backward_data.default"``."""
    peak_module: str | None = None
    """Qualified name of the module at the peak; ``""`` is the root."""
    num_parameters: int
    """Distinct parameters of the model, tied ones counted once."""

    def beside(self, held_bytes: int, category: Category = "callbacks") -> MemoryBreakdown:
        """The same with what is held all the time beside the step, in bytes: by callbacks, or in another category."""
        if not held_bytes:
            return self

        def more(size: int | None) -> int | None:
            return None if size is None else size + held_bytes

        return replace(
            self,
            peak_allocated_bytes=self.peak_allocated_bytes + held_bytes,
            peak_reserved_bytes=more(self.peak_reserved_bytes),
            minimum_feasible_bytes=more(self.minimum_feasible_bytes),
            by_category={**self.by_category, category: self.by_category.get(category, 0) + held_bytes},
            by_phase={phase: size + held_bytes for phase, size in self.by_phase.items()},
        )

    @property
    def least_bytes(self) -> int:
        """What a budget must have: on a GPU the smallest capacity in which the run survives, else the peak."""
        return self.peak_allocated_bytes if self.minimum_feasible_bytes is None else self.minimum_feasible_bytes

    @property
    def bytes_per_parameter(self) -> float | None:
        """Peak divided by the number of parameters; ``None`` for a model without any."""
        return self.peak_allocated_bytes / self.num_parameters if self.num_parameters else None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan may use, and how that number was formed."""

    budget_bytes: int
    """Bytes of the torch allocator that a plan may use."""
    capacity_bytes: int
    """What the process could hold on the device."""
    headroom_bytes: int
    """Left free on purpose."""
    non_torch_bytes: int
    """Held by the process but not by this model and batch: interpreter, libraries, datasets."""
    reason: str
    """How the budget was formed, in words."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one candidate is predicted to need."""

    candidate: Candidate
    """The setting of the levers."""
    memory: MemoryBreakdown
    """Predicted peak, raw: before any measurement."""
    correction_bytes: int = 0
    """Added to the raw peak because a warm-up measured that much more (or less)."""
    method: Method = "traced"
    """How it was found: a traced step; small real steps and a straight line through them; or neither could be had, and
    it is only what is certainly needed."""
    flops: int | None = None
    """Floating point operations per optimizer step on one device; ``None`` where not counted."""
    recomputed_flops: int | None = None
    """Those of them that activation checkpointing repeats."""
    predicted_step_seconds: float | None = None
    """Wall-clock seconds of one optimizer step; ``None`` where no rates of the device are known."""
    exchanged_bytes: int | None = None
    """Bytes that one rank sends to the others per optimizer step; ``None`` on one device."""
    seconds_count_exchanges: bool = False
    """Whether the predicted seconds include sending them, at what the vendor says of the link between the devices."""
    host_bytes: int | None = None
    """Bytes that one rank keeps in the host's memory instead of the device's; ``None`` where nothing is offloaded."""
    predicted_evaluation_peak_bytes: int | None = None
    """Peak of the first evaluation steps, raw; ``None`` if the run does not validate, or they could not be traced."""
    evaluation_peak_bytes: int | None = None
    """What an evaluation needs beside this candidate's optimizer states, where the warm-up of another candidate showed
    that evaluation and not training decides; else ``None``."""
    confirmed: bool = True
    """Whether this very candidate was traced; ``False`` if it was derived from the traces of others."""
    notes: tuple[str, ...] = ()
    """Assumptions made on the way, in words."""

    @property
    def predicted_training_peak_bytes(self) -> int:
        """Raw peak (on a GPU the smallest capacity in which the run survives) and correction."""
        return self.memory.least_bytes + self.correction_bytes

    @property
    def predicted_peak_bytes(self) -> int:
        """That of training, or what an evaluation needs, where that is known to be more."""
        return max(self.predicted_training_peak_bytes, self.evaluation_peak_bytes or 0)


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A candidate that was not taken, and why."""

    candidate: Candidate
    """The setting of the levers."""
    predicted_peak_bytes: int | None
    """Its predicted peak; ``None`` if it was ruled out without a forecast."""
    predicted_step_seconds: float | None = None
    """Wall-clock seconds of one optimizer step; ``None`` where they were not predicted."""
    reason: str
    """Why it was passed over."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One decision made for the user."""

    lever: str
    """The lever, in the words of the public arguments."""
    value: str
    """What was chosen."""
    reason: str
    """Why, and what it costs."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen candidate with everything that led to it."""

    request: PlanRequest
    """What was asked for."""
    device: DeviceSpec
    """Where it runs."""
    budget: Budget
    """What it may use."""
    forecast: Forecast
    """The chosen candidate and its predicted peak."""
    choices: tuple[Choice, ...]
    """Every decision with its reason."""
    passed_over: tuple[PassedOver, ...] = ()
    """Other candidates, each with its reason."""
    notes: tuple[str, ...] = ()
    """What the user should know: fallbacks taken, things left alone."""
    planned_batch: str = "the batch that was given"
    """Which batch the forecast and the proof are of, in words, with its shapes."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """What the plan was made for, by name, such as the model's structure; a plan is stale where one of them differs."""
    schema_version: int = SCHEMA_VERSION
    """Version of this structure in files."""

    @property
    def candidate(self) -> Candidate:
        """The chosen setting of the levers."""
        return self.forecast.candidate

    @property
    def split(self) -> BatchSplit:
        """How the effective batch is divided."""
        return self.forecast.candidate.split

    def to_dict(self) -> dict[str, Any]:
        """Plain data: dicts, lists, numbers and text."""
        plain: dict[str, Any] = plain_data(self)
        return plain

    def save(self, path: str | Path) -> Path:
        """Write the plan as YAML, whole or not at all, and return the path; missing folders are made.

        Raises:
            PlanFileError: if :meth:`load` would refuse it, naming the field; nothing is written then.
            OSError: if the folder cannot be written to; an earlier file of that name is then untouched.
        """
        from lightning_memfit import plan_schema

        return plan_schema.save_plan(self, path)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Rebuild a plan from :meth:`to_dict`.

        Raises:
            PlanFileError: naming the field that is missing, unknown, of another type, out of range, or at odds with
                another.
        """
        from lightning_memfit import plan_schema

        return plan_schema.read_plan(data)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by :meth:`save`, or the record that a run leaves; nothing in the file is executed.

        Raises:
            PlanFileError: if the file cannot be read, is not plain YAML, or is no plan of this schema version.
        """
        from lightning_memfit import plan_schema

        return plan_schema.load_plan(path)
