"""The strict reader of plans: plain data becomes a :class:`Plan` only if every field is what the vocabulary says.

What a field may hold is read off the dataclasses' own annotations, so that a field added there is checked here. Ranges
and what fields say about each other stand in the tables below.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, cast

from lightning_memfit.errors import ConfigurationError, PlanFileError
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.measurement import Measurement, SecondsSpent
from lightning_memfit.plan import (
    CATEGORIES,
    PHASES,
    SCHEMA_VERSION,
    BatchSplit,
    Candidate,
    Forecast,
    MemoryBreakdown,
    Plan,
    PlanRequest,
)
from lightning_memfit.plan_file import WAY_OUT, parse_plain, plain_data, read_plain, to_yaml, write_whole
from lightning_memfit.sharding import Sharding

BESIDE_THE_PLAN = ("measured", "seconds_spent", "versions", "written_at")
"""What the record of a run holds beside the plan's fields."""

_MOST = 2**63 - 1
_RANGES: Mapping[str, tuple[int, int]] = {
    # Everything that is not here is at least 0 and below 2^63.
    "PlanRequest.budget": (1, _MOST),
    "PlanRequest.effective_batch_size": (1, _MOST),
    "PlanRequest.micro_batch_size": (1, _MOST),
    "PlanRequest.max_length": (1, _MOST),
    "PlanRequest.num_profiled_steps": (2, _MOST),
    "DeviceSpec.cores": (1, _MOST),
    "BatchSplit.effective_batch_size": (1, _MOST),
    "BatchSplit.ranks": (1, _MOST),
    "BatchSplit.loader_batch_size": (1, _MOST),
    "BatchSplit.accumulate_grad_batches": (1, _MOST),
    "BatchSplit.slice_sizes": (1, _MOST),
    "Sharding.ranks": (1, _MOST),
    "Forecast.correction_bytes": (-_MOST, _MOST),
    "Forecast.flops": (0, 2**100),
    "Forecast.recomputed_flops": (0, 2**100),
    "OptimizerStatesMeasurement.saved_bytes": (-_MOST, _MOST),
}
_NAMES: Mapping[str, tuple[str, ...]] = {
    # A step that could only be run for real tells the parameters from the rest, and nothing more.
    "MemoryBreakdown.by_category": (*CATEGORIES, "unattributed"),
    "MemoryBreakdown.by_phase": PHASES,
    "DeviceSpec.peak_flops": ("fp32", "tf32", "fp16", "bf16", "fp8"),
}
_ADDED_LATER: Mapping[type, frozenset[str]] = {
    # Fields that files written before they existed may lack; their defaults say what was true then.
    DeviceSpec: frozenset(
        {
            "key", "is_present", "uuid", "compute_capability", "multiprocessors", "total_bytes", "context_low_bytes",
            "context_high_bytes", "neighbours", "mig_profile", "memory_fraction", "allocator_settings", "spills",
            "unified_memory", "bandwidth_bytes_per_second", "link_bytes_per_second", "peak_flops", "attention_backends",
            "unknowns",
        }
    ),
    Candidate: frozenset({"sharding"}),
    Forecast: frozenset({"exchanged_bytes", "seconds_count_exchanges", "host_bytes"}),
    Sharding: frozenset(spec.name for spec in dataclasses.fields(Sharding)) - {"engine", "ranks"},
    Measurement: frozenset(
        {"measured_peak_reserved_bytes", "measured_device_total_bytes", "measured_peak_bytes_by_rank"}
    ),
}  # fmt: skip


def load_plan(path: str | Path) -> Plan:
    """Read the plan in a file; see :meth:`Plan.load`.

    Raises:
        PlanFileError: naming the path, the field, its value, and what it must be.
    """
    return read_plan(read_plain(Path(path)), source=str(path))


def load_measurement(path: str | Path) -> Measurement | None:
    """Read what was measured beside the plan in a run's record; ``None`` if nothing was.

    Raises:
        PlanFileError: as :func:`load_plan` does.
    """
    data = read_plain(Path(path))
    if not isinstance(data, Mapping) or data.get("measured") is None:
        return None
    measured = data["measured"]
    if isinstance(measured, Mapping):  # the record repeats the larger of the two peaks
        measured = {name: value for name, value in measured.items() if name != "measured_peak_bytes"}
    return cast(Measurement, _Reader(str(path)).read(Measurement, measured, "measured"))


def load_seconds_spent(path: str | Path) -> SecondsSpent | None:
    """Read what MemFit took of a run, from its record; ``None`` if that does not say.

    Raises:
        PlanFileError: as :func:`load_plan` does.
    """
    data = read_plain(Path(path))
    spent = data.get("seconds_spent") if isinstance(data, Mapping) else None
    if spent is None:
        return None
    return cast(SecondsSpent, _Reader(str(path)).read(SecondsSpent, spent, "seconds_spent"))


def save_plan(plan: Plan, path: str | Path) -> Path:
    """Write a plan; see :meth:`Plan.save`.

    Raises:
        PlanFileError: if reading would refuse it, naming the field; nothing is written then.
        OSError: if the folder cannot be written to; an earlier file is then untouched.
    """
    text = to_yaml(plain_data(plan))
    source = f"The plan to be saved as {path}"
    read_plan(parse_plain(text, source=source), source=source)
    return write_whole(Path(path), text)


def read_plan(data: Any, *, source: str = "The plan that was given") -> Plan:
    """Make a plan of plain data.

    Args:
        data: as :meth:`Plan.to_dict` makes it, also with what a run's record holds beside it.
        source: where the data is from, such as a path; begins the message.

    Raises:
        PlanFileError: naming the source, the field as a dotted path, its value shortened, and what it must be.
    """
    reader = _Reader(source)
    if not isinstance(data, Mapping):
        raise reader.refusal("", data, "a mapping of the plan's fields")
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise PlanFileError(
            f"{source} cannot be used as a plan: schema_version is {_shown(version)}, and this release reads "
            f"{SCHEMA_VERSION}. {WAY_OUT}"
        )
    return cast(Plan, reader.read(Plan, {name: data[name] for name in data if name not in BESIDE_THE_PLAN}, ""))


def read_candidate(data: Any, *, source: str) -> Candidate:
    """Make a candidate of plain data.

    Raises:
        PlanFileError: as :func:`read_plan` does.
    """
    return cast(Candidate, _Reader(source).read(Candidate, data, "candidate"))


class _Reader:
    """Makes values of the kinds that annotations name."""

    def __init__(self, source: str) -> None:
        self._source = source

    def refusal(self, field: str, value: Any, expected: str) -> PlanFileError:
        what = f"{field} is" if field else "it is"
        return PlanFileError(
            f"{self._source} cannot be used as a plan: {what} {_shown(value)}, but must be {expected}. {WAY_OUT}"
        )

    def read(self, kind: Any, value: Any, field: str, key: str = "") -> Any:
        """The value of one field.

        Args:
            kind: the annotation.
            value: plain data.
            field: the dotted path, for the message.
            key: ``"Class.field"``, for the tables.
        """
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if dataclasses.is_dataclass(kind):
            return self._record(cast(type, kind), value, field)
        if origin in (Union, types.UnionType):
            return self._one_of(kind, inner, value, field, key)
        if not _looks_like(kind, value):
            raise self.refusal(field, value, _words(kind, key))
        if origin is Literal:
            if value not in inner:
                raise self.refusal(field, value, _words(kind, key))
            return value
        if origin is tuple:
            return tuple(self.read(inner[0], item, f"{field}[{index}]", key) for index, item in enumerate(value))
        if origin is Mapping:
            return self._mapping(inner[1], value, field, key)
        return self._number(kind, value, field, key) if kind in (int, float) else value

    def _one_of(self, kind: Any, members: tuple[Any, ...], value: Any, field: str, key: str) -> Any:
        if value is None and types.NoneType in members:
            return None
        member = next((each for each in members if each is not types.NoneType and _looks_like(each, value)), None)
        if member is None:
            raise self.refusal(field, value, _words(kind, key))
        return self.read(member, value, field, key)

    def _number(self, kind: Any, value: Any, field: str, key: str) -> Any:
        least, most = _RANGES.get(key, (0, _MOST))
        if not least <= value <= most:  # nor is nan
            raise self.refusal(field, value, _words(kind, key))
        return kind(value)

    def _mapping(self, kind: Any, value: Mapping[Any, Any], field: str, key: str) -> dict[str, Any]:
        known = _NAMES.get(key)
        read: dict[str, Any] = {}
        for name, item in value.items():
            if type(name) is not str:
                raise self.refusal(f"a name in {field}", name, "text")
            if known is not None and name not in known:
                raise self.refusal(f"a name in {field}", name, _any_of(known))
            read[name] = self.read(kind, item, _below(field, name), key)
        return read

    def _record(self, cls: type, value: Any, field: str) -> Any:
        if not _looks_like(cls, value):
            raise self.refusal(field, value, _words(cls))
        names = [spec.name for spec in dataclasses.fields(cls)]
        for name in value:
            if type(name) is not str or name not in names:
                raise self._about_field(_below(field, name), f"is not known to this release ({cls.__name__})")
        may_be_missing = _ADDED_LATER.get(cls, frozenset())
        names = [name for name in names if name in value or name not in may_be_missing]
        for name in names:
            if name not in value:
                raise self._about_field(_below(field, name), "is missing")
        kinds = _annotations(cls)
        values = {
            name: self.read(kinds[name], value[name], _below(field, name), f"{cls.__name__}.{name}") for name in names
        }
        for name, expected in _CONTRADICTIONS.get(cls, _none)(values):
            raise self.refusal(f"{field}.{name}" if field else name, _reach(values, name), expected)
        try:
            return cls(**values)
        except ConfigurationError as error:  # what the class checks by itself
            raise PlanFileError(
                f"{self._source} cannot be used as a plan: {field or 'it'} is refused: {error} {WAY_OUT}"
            ) from error

    def _about_field(self, field: str, what: str) -> PlanFileError:
        return PlanFileError(f"{self._source} cannot be used as a plan: the field {field} {what}. {WAY_OUT}")


# What fields say about each other: a name below the record, and what its value must be.

Contradictions = Iterator[tuple[str, str]]


def _none(values: Mapping[str, Any]) -> Contradictions:
    yield from ()


def _device(values: Mapping[str, Any]) -> Contradictions:
    capability = values.get("compute_capability")
    if capability is not None and len(capability) != 2:
        yield "compute_capability", "two numbers, major and minor"
    low, high = values.get("context_low_bytes"), values.get("context_high_bytes")
    if low is not None and (high is None or high < low):
        yield "context_high_bytes", f"at least the {low} of context_low_bytes"


def _split(values: Mapping[str, Any]) -> Contradictions:
    ranks, accumulate, loader = (values[n] for n in ("ranks", "accumulate_grad_batches", "loader_batch_size"))
    product, sizes = ranks * accumulate * loader, values["slice_sizes"]
    if values["effective_batch_size"] != product:
        yield (
            "effective_batch_size",
            f"{ranks} ranks x accumulate_grad_batches {accumulate} x loader_batch_size {loader} = {product}",
        )
    if sum(sizes) != loader:
        yield "slice_sizes", f"sizes that add up to loader_batch_size {loader}; they add up to {sum(sizes)}"
    if list(sizes) != sorted(sizes, reverse=True):
        yield "slice_sizes", "sizes with the largest first"


def _candidate(values: Mapping[str, Any]) -> Contradictions:
    kind, modules = values["activation_checkpointing"], values["checkpointed_modules"]
    if (kind == "none") != (not modules):
        expected = "empty" if kind == "none" else "names of modules"
        yield "checkpointed_modules", f"{expected}, since activation_checkpointing is {kind!r}"
    if len(set(modules)) != len(modules):
        yield "checkpointed_modules", "names that occur once each"


def _memory(values: Mapping[str, Any]) -> Contradictions:
    peak, parts = values["peak_allocated_bytes"], values["by_category"]
    if parts and sum(parts.values()) != peak:
        yield (
            "by_category",
            f"empty, or bytes that add up to peak_allocated_bytes {peak}; they add up to {sum(parts.values())}",
        )


def _forecast(values: Mapping[str, Any]) -> Contradictions:
    flops, recomputed = values["flops"], values["recomputed_flops"]
    if recomputed is not None and (flops is None or recomputed > flops):
        yield "recomputed_flops", f"null or a part of flops, which is {_shown(flops)}"
    peak = values["memory"].peak_allocated_bytes
    if peak + values["correction_bytes"] < 0:
        yield "correction_bytes", f"at least -{peak}, so that the corrected peak is not below 0"


def _plan(values: Mapping[str, Any]) -> Contradictions:
    request: PlanRequest = values["request"]
    candidate: Candidate = values["forecast"].candidate
    split: BatchSplit = candidate.split
    at = "forecast.candidate"
    asked, precision = request.effective_batch_size, request.precision
    if asked is not None and asked != split.effective_batch_size:
        yield f"{at}.split.effective_batch_size", f"the {asked} of request.effective_batch_size"
    if precision is not None and precision != candidate.precision:
        yield f"{at}.precision", f"the {precision!r} of request.precision"
    if request.micro_batch_size is not None and split.micro_batch_size > request.micro_batch_size:
        yield f"{at}.split.slice_sizes", f"at most the {request.micro_batch_size} of request.micro_batch_size each"


_CONTRADICTIONS: Mapping[type, Callable[[Mapping[str, Any]], Contradictions]] = {
    DeviceSpec: _device,
    BatchSplit: _split,
    Candidate: _candidate,
    MemoryBreakdown: _memory,
    Forecast: _forecast,
    Plan: _plan,
}


@functools.cache
def _annotations(cls: type) -> Mapping[str, Any]:
    # `measurement.py` names this class without importing it.
    return typing.get_type_hints(cls, localns={"Candidate": Candidate})


def _looks_like(kind: Any, value: Any) -> bool:
    """Whether plain data is of the shape of a kind; exact types, since ``True`` is no number and a subclass no text."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return type(value) in {type(choice) for choice in typing.get_args(kind)}
    if origin is tuple:
        return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    if origin is Mapping or dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)
    return type(value) in ((int, float) if kind is float else (kind,))


def _words(kind: Any, key: str = "") -> str:
    """What a kind accepts, for messages."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(member, key) for member in inner)
    if origin is Literal:
        return _any_of(inner)
    if origin is tuple:
        return f"a list of which each entry is {_words(inner[0], key)}"
    if origin is Mapping or dataclasses.is_dataclass(kind):
        return "a mapping"
    if kind is int:
        least, most = _RANGES.get(key, (0, _MOST))
        return f"a whole number from {_bound(least)} to {_bound(most)}"
    return {float: f"a number from 0 to {_bound(_MOST)}", bool: "true or false", str: "text"}.get(kind, "null")


def _any_of(names: Sequence[str]) -> str:
    return f"one of {', '.join(map(repr, names))}"


def _bound(bound: int) -> str:
    """A bound of the table, readable."""
    return {_MOST: "2^63 - 1", -_MOST: "-2^63 + 1", 2**100: "2^100"}.get(bound, str(bound))


def _shown(value: Any, *, nested: bool = False) -> str:
    """A value in YAML's words, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, int, float)):
        return _cut(value)
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)} entries"
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        first = ", ".join(_shown(item, nested=True) for item in value[:4])
        return f"a list of {len(value)}" + ("" if nested else f": [{first}{', ...' if len(value) > 4 else ''}]")
    return f"a {type(value).__qualname__}"


def _cut(value: str | float) -> str:
    shortened = reprlib.Repr()
    shortened.maxstring = 60
    return shortened.repr(value)


def _below(field: str, name: Any) -> str:
    shown = name if isinstance(name, str) and name.isidentifier() and len(name) <= 60 else _shown(name)
    return f"{field}.{shown}" if field else shown


def _reach(values: Mapping[str, Any], dotted: str) -> Any:
    first, *rest = dotted.split(".")
    return functools.reduce(getattr, rest, values[first])
