"""Runs the sections of the check within a time, and writes down what each found; one that fails stops no other."""

from __future__ import annotations

import gc
import importlib.util
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import boundaries, fits, machine, operators, traces
from benchmarks.gpu_check.cases import Case, all_cases, measured, predicted, triple
from benchmarks.gpu_check.gauges import CudaGauge, Gauge, gauge_of
from benchmarks.gpu_check.workloads import Size, models_of
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.gpu_probe import probe_present
from lightning_memfit.predict.cuda_temporaries import CudaArchitecture

FORMAT = 1
"""Of the JSON that is written."""
_SPARE_GPU = "a100-40gb"
"""What is forecast for besides the host where there is no GPU, so that this path runs too."""

Rows = Iterable[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the check."""

    name: str
    """In the JSON."""
    share: float
    """Of the whole time: the most that it may take; what it leaves is for those behind it."""
    rows: Callable[[], Rows]
    """What it finds, row by row: time is looked at in between."""


@dataclass
class Check:
    """One run of the check."""

    device: str
    seconds: float
    out: Path | None
    models: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> Size:
        """The sizes of the device."""
        return "full" if self.device == "cuda" else "small"

    def run(self, only: list[str]) -> dict[str, Any]:
        """Run the named sections, all if none is named, and return the report."""
        begin = time.monotonic()
        self.report = {"format": FORMAT, "device": self.device, "seconds_allowed": self.seconds, "sections": {}}
        self.report["machine"] = machine.described(self.device)
        gauge = gauge_of(self.device)
        names = self.models or list(models_of(self.size))
        sections = [each for each in self._sections(gauge, names) if not only or each.name in only]
        for section in sections:
            end = min(begin + self.seconds, time.monotonic() + section.share * self.seconds)
            self.report["sections"][section.name] = self._guarded(section, end)
            gc.collect()
            self.report["seconds"] = time.monotonic() - begin
            self.write()
        return self.report

    def write(self) -> None:
        """Write what is known so far, whole."""
        if self.out is None:
            return
        unfinished = self.out.with_name(f"{self.out.name}.part")
        unfinished.write_text(json.dumps(self.report, indent=1, default=str) + "\n", encoding="utf-8")
        unfinished.replace(self.out)

    def _guarded(self, section: Section, end: float) -> dict[str, Any]:
        begin, found = time.monotonic(), {"status": "done", "rows": []}
        rows: list[dict[str, Any]] = found["rows"]  # type: ignore[assignment]
        try:
            for row in section.rows():
                rows.append(row)
                if time.monotonic() >= end:
                    found["status"] = "out of time"
                    break
        except Exception as error:
            found |= {"status": "failed", "error": _words(error), "trace": traceback.format_exc()[-3000:]}
        found["seconds"] = time.monotonic() - begin
        return found

    def _sections(self, gauge: Gauge, names: list[str]) -> list[Section]:
        on_gpu = self.device == "cuda"
        # A context is seen to grow only once, so it comes first.
        return [
            Section(name="context", share=0.05, rows=lambda: [machine.context(gauge)]),
            Section(name="device", share=0.05, rows=lambda: [machine.spec(self.device)]),
            Section(name="probe", share=0.05, rows=self._probe if on_gpu else list),
            Section(name="workspaces", share=0.05, rows=lambda: self._workspaces(gauge)),
            Section(name="attention", share=0.05, rows=lambda: self._attention(gauge) if on_gpu else []),
            Section(name="operators", share=0.1, rows=lambda: self._operators(gauge)),
            Section(name="probes", share=0.1, rows=lambda: self._probes(names)),
            Section(name="probes_by_operator", share=0.01, rows=self._probes_by_operator),
            Section(name="probing_process", share=0.05, rows=lambda: self._probing_process(gauge, names)),
            Section(name="cases", share=0.5, rows=lambda: self._cases(gauge, names)),
            Section(name="boundaries", share=0.2, rows=lambda: self._boundaries(gauge, names)),
            Section(name="budgets", share=0.2, rows=lambda: self._budgets(gauge, names)),
            Section(name="fits", share=0.15, rows=lambda: self._fits(gauge, names)),
            Section(name="traces", share=0.2, rows=self._traces),
            Section(name="rates", share=0.1, rows=lambda: machine.rates(gauge, full=on_gpu)),
        ]

    def _cases(self, gauge: Gauge, names: list[str]) -> Iterator[dict[str, Any]]:
        has_8bit = self.device == "cuda" and importlib.util.find_spec("bitsandbytes") is not None
        for case in all_cases(self.size, names, has_8bit=has_8bit):
            yield self._case(case, gauge)

    def _case(self, case: Case, gauge: Gauge) -> dict[str, Any]:
        """One case; an error is that of this case alone."""
        row: dict[str, Any] = {"label": case.label}
        try:
            begin = time.monotonic()
            memory = predicted(case, self._forecast_for)
            row |= {**triple(memory), "peak_phase": memory.peak_phase, "peak_op": memory.peak_op}
            row["forecast_seconds"] = time.monotonic() - begin
            if self.device != "cuda":
                row["without_gpu"] = triple(predicted(case, _SPARE_GPU))
                row["forecast_without_gpu_seconds"] = time.monotonic() - begin - row["forecast_seconds"]
            row |= measured(case, gauge)
            if not row["ran_out"]:
                row["relative_error"] = memory.peak_allocated_bytes / row["measured_peak_allocated_bytes"] - 1
        except Exception as error:
            row["error"] = _words(error)
        return row

    def _boundaries(self, gauge: Gauge, names: list[str]) -> Iterator[dict[str, Any]]:
        for case in all_cases(self.size, names, has_8bit=False):
            if case.checkpointing == "blocks" and self.device == "cuda":
                continue
            yield boundaries.limits_of(case, self._forecast_for, gauge)
            if self.device != "cuda" and not self.models:
                return

    def _budgets(self, gauge: Gauge, names: list[str]) -> Iterator[dict[str, Any]]:
        budgets = boundaries.budgets_for(gauge, gauge.total_bytes if isinstance(gauge, CudaGauge) else None)
        wanted = [name for name in ("gpt", "resnet101", "vit") if name in names] or names[:1]
        for name in wanted[: None if self.device == "cuda" else 1]:
            case = Case(model=name, size=self.size, precision="bf16-mixed", checkpointing="none", stepping="foreach")
            yield from boundaries.budgets_of(case, self._forecast_for, gauge, budgets)

    def _fits(self, gauge: Gauge, names: list[str]) -> Iterator[dict[str, Any]]:
        """On a GPU under a budget that the whole batch does not fit, and one that it does."""
        for name in [name for name in ("gpt", "vit", "resnet") if name in names] or names[:1]:
            case = Case(model=name, size=self.size, precision="32-true", checkpointing="none", stepping="foreach")
            needs = boundaries.least_enough(predicted(case, self._forecast_for))
            for share in (0.7, 1.2) if self.device == "cuda" else (1.2,):
                gauge.clean()
                yield fits.fit_with_memfit(case, self.device, int(share * needs))
            if self.device != "cuda":
                return

    def _operators(self, gauge: Gauge) -> Rows:
        return operators.hidden_temporaries(gauge, self._architecture, operators.programs(self.device == "cuda"))

    def _probe(self) -> Rows:
        """The package's own probe, measured anew, and how long it takes."""
        begin = time.monotonic()
        probe = probe_present(detect_device("cuda:0"), cache_dir=None)
        return [{**asdict(probe), "seconds": time.monotonic() - begin}]

    def _probes(self, names: list[str]) -> Iterator[dict[str, Any]]:
        for name in [name for name in ("resnet", "lstm", "gpt") if name in names] or names[:1]:
            case = Case(model=name, size=self.size, precision="bf16-mixed", checkpointing="none", stepping="foreach")
            yield from operators.probed_calls(case, self._forecast_for, self._architecture)
            if self.device != "cuda":
                return

    def _probes_by_operator(self) -> Rows:
        """What the section before found, operator by operator: probes against formulas."""
        return operators.compared_by_operator(self.report["sections"].get("probes", {}).get("rows", []))

    def _probing_process(self, gauge: Gauge, names: list[str]) -> Iterator[dict[str, Any]]:
        gauge.clean()
        for name in [name for name in ("resnet", "gpt") if name in names] or names[:1]:
            case = Case(model=name, size=self.size, precision="32-true", checkpointing="none", stepping="foreach")
            yield operators.probing_process(case, self._forecast_for, self._architecture, self._free_bytes)
            if self.device != "cuda":
                return

    def _free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(0)[0]) if self.device == "cuda" else 0

    def _workspaces(self, gauge: Gauge) -> Rows:
        return [operators.kept_workspaces(gauge, self._architecture)]

    def _attention(self, gauge: Gauge) -> Rows:
        return operators.attention_choices(gauge.device, self._architecture.compute_capability)

    def _traces(self) -> Rows:
        cases = traces.cases_here([name for name in self.models if name in models_of("small")])
        return traces.compared(cases if self.device == "cuda" else cases[:1], self.device)

    @property
    def _forecast_for(self) -> str:
        return "cuda:0" if self.device == "cuda" else "cpu"

    @property
    def _architecture(self) -> CudaArchitecture:
        major, minor = torch.__version__.split(".")[:2]
        version = int(major), int(minor)
        if self.device != "cuda":
            return CudaArchitecture(compute_capability=(8, 0), multiprocessors=None, torch_minor=version)
        properties = torch.cuda.get_device_properties(0)
        return CudaArchitecture(
            compute_capability=(properties.major, properties.minor),
            multiprocessors=properties.multi_processor_count,
            torch_minor=version,
        )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
