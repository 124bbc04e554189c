"""The report, rendered to text at fixed widths and read like a person would."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console, RenderableType

from lightning_memfit.hardware.catalog import catalog_device
from lightning_memfit.plan import Choice, Measurement, MemoryBreakdown, Plan, TimedPlan
from lightning_memfit.report.table import (
    best_passed_over,
    measurement_renderable,
    plan_renderable,
    render_measurement,
    render_plan,
)
from lightning_memfit.units import MIB


def rendered(renderable: RenderableType, *, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, start: str) -> list[str]:
    """The cells of the line that starts with ``start``."""
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith(start))
    return re.split(r"\s{2,}", line)


def in_one_line(text: str) -> str:
    return " ".join(text.split())


# --- plan


def test_the_verdict_comes_first(plan: Plan) -> None:
    top = in_one_line("\n".join(rendered(plan_renderable(plan), width=80).splitlines()[:10]))
    assert "4 slices of <= 8, gradients zeroed early" in top
    # 560 / 700 = 80 %, 700 - 560 = 140
    assert "peak allocated 560.0 MiB of 700.0 MiB (80.0 %): fits, 140.0 MiB left" in top
    assert "effective batch 64 = 2 accumulated batches x 32 samples, each batch in slices of 8 + 8 + 8 + 8" in top
    assert "budget 700.0 MiB: as given" in top
    assert "AMD EPYC 7B13 (cpu, 2 cores)" in top


def test_of_a_gpu_what_its_allocator_must_reserve_is_held_against_the_budget(plan: Plan) -> None:
    memory = dataclasses.replace(plan.forecast.memory, minimum_feasible_bytes=600 * MIB, peak_reserved_bytes=650 * MIB)
    forecast = dataclasses.replace(plan.forecast, memory=memory, correction_bytes=0)
    on_a_gpu = dataclasses.replace(plan, forecast=forecast, device=catalog_device("t4"))
    text = in_one_line(rendered(plan_renderable(on_a_gpu)))
    assert "least reserved 600.0 MiB of 700.0 MiB (85.7 %): fits, 100.0 MiB left" in text
    assert "predicted to survive in 600.0 MiB, and to reserve 650.0 MiB where there is room" in text
    assert "Tesla T4 (not in this machine, 14.56 GiB in all" in text


def test_a_plan_over_its_budget_says_so(plan: Plan) -> None:
    tight = dataclasses.replace(plan, budget=dataclasses.replace(plan.budget, budget_bytes=400 * MIB))
    text = in_one_line(rendered(plan_renderable(tight)))
    assert "peak allocated 560.0 MiB of 400.0 MiB (140.0 %): does not fit, 160.0 MiB over" in text


def test_the_anatomy_gives_bytes_share_and_bytes_per_parameter(plan: Plan) -> None:
    """Reported in keras-team/keras-hub#1628, MIC-DKFZ/nnUNet#173, MIC-DKFZ/nnUNet#1152."""
    text = rendered(plan_renderable(plan))
    # 10 Mi parameters; 40/560 = 7.14 %, 80/560 = 14.29 %, 350/560 = 62.5 %
    assert row(text, "parameters")[1:4] == ["40.00 MiB", "7.1 %", "4.00"]
    assert row(text, "optimizer states")[1:4] == ["80.00 MiB", "14.3 %", "8.00"]
    assert row(text, "activations")[1:4] == ["350.0 MiB", "62.5 %", "35.00"]
    assert row(text, "buffers")[1:4] == ["0 B", "0.0 %", "0.00"]
    assert row(text, "sum")[1:4] == ["560.0 MiB", "100.0 %", "56.00"]


def test_every_category_has_a_row_also_one_unknown_to_the_report(plan: Plan) -> None:
    sizes = {**plan.forecast.memory.by_category, "workspaces": 8 * MIB}
    memory = dataclasses.replace(plan.forecast.memory, by_category=sizes)
    text = rendered(
        plan_renderable(dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, memory=memory)))
    )
    for name in sizes:
        assert row(text, name.replace("_", " "))


def test_the_place_of_the_peak_is_named(plan: Plan) -> None:
    text = in_one_line(rendered(plan_renderable(plan), width=80))
    assert "peak in the backward, at aten._log_softmax_backward_data.default, in module lm_head" in text
    assert "by phase: forward 500.0 MiB, backward 560.0 MiB, optimizer step 240.0 MiB, evaluation 310.0 MiB" in text


def test_the_root_module_has_a_name(plan: Plan) -> None:
    memory = dataclasses.replace(plan.forecast.memory, peak_module="", peak_op=None)
    text = rendered(
        plan_renderable(dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, memory=memory)))
    )
    assert "peak in the backward, in module (root)" in text


def test_a_correction_is_shown_apart_from_the_raw_sum(plan: Plan) -> None:
    corrected = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, correction_bytes=5 * MIB))
    text = rendered(plan_renderable(corrected))
    assert row(text, "sum, raw")[1] == "560.0 MiB"
    assert row(text, "correction by the warm-up")[1] == "+5.000 MiB"
    assert row(text, "predicted peak")[1] == "565.0 MiB"
    assert "correction" not in rendered(plan_renderable(plan))


def test_every_decision_has_its_reason(plan: Plan) -> None:
    """Reported in roboflow/rf-detr#1176."""
    text = in_one_line(rendered(plan_renderable(plan), width=80))
    for choice in plan.choices:
        assert in_one_line(f"{choice.lever} {choice.value}: {choice.reason}")[:40] in text
    assert "costs 3 more forward and backward calls per batch" in text


def test_notes_of_the_plan_and_of_the_forecast_appear_once(plan: Plan) -> None:
    note = plan.notes[0]
    doubled = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, notes=(note, "extrapolated twice")))
    text = in_one_line(rendered(plan_renderable(doubled), width=80))
    assert text.count(note) == 1
    assert "- extrapolated twice" in text


def test_an_extrapolated_forecast_is_not_shown_as_a_traced_one(plan: Plan) -> None:
    rough = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, method="extrapolated"))
    assert "extrapolated from small measured steps" in rendered(plan_renderable(rough))
    assert "extrapolated" not in rendered(plan_renderable(plan))


def test_the_best_rejected_candidates_come_first(plan: Plan) -> None:
    order = [passed.predicted_peak_bytes for passed in best_passed_over(plan.passed_over, 700 * MIB)]
    # Those that fit as the planner gave them, then the smallest excess, then the one without a forecast.
    sizes = [640, 490, 410, 732, 1010, 1080, 1960]
    assert order == [*(size * MIB for size in sizes), None]


def test_six_rejected_candidates_are_shown_and_the_rest_counted(plan: Plan) -> None:
    text = rendered(plan_renderable(plan), width=80)
    assert "and 2 more in plan.yaml" in text
    assert "1.055 GiB" in text  # the sixth, 1080 MiB
    assert "1.914 GiB" not in text  # the seventh, 1960 MiB
    six = dataclasses.replace(plan, passed_over=plan.passed_over[:6])
    assert "more in plan.yaml" not in rendered(plan_renderable(six))


def test_many_slices_are_not_listed_one_by_one(plan: Plan) -> None:
    split = dataclasses.replace(plan.split, slice_sizes=(1,) * 32)
    candidate = dataclasses.replace(plan.candidate, split=split)
    many = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, candidate=candidate))
    assert "each batch in 32 slices of at most 1" in rendered(plan_renderable(many))


def test_an_undivided_batch_is_called_that(plan: Plan) -> None:
    split = dataclasses.replace(plan.split, effective_batch_size=32, accumulate_grad_batches=1, slice_sizes=(32,))
    candidate = dataclasses.replace(plan.candidate, split=split)
    whole = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, candidate=candidate))
    assert "effective batch 32, each batch undivided" in rendered(plan_renderable(whole))


def test_a_plan_without_details_still_renders(plan: Plan) -> None:
    bare = dataclasses.replace(
        plan,
        forecast=dataclasses.replace(
            plan.forecast,
            memory=MemoryBreakdown(peak_allocated_bytes=0, peak_phase="forward", num_parameters=0),
            notes=(),
        ),
        choices=(),
        passed_over=(),
        notes=(),
    )
    text = rendered(plan_renderable(bare), width=80)
    assert row(text, "sum") == ["sum", "0 B", "-", "-"]
    assert "Passed over" not in text
    assert "Notes" not in text


def test_brackets_in_names_are_text_and_not_markup(plan: Plan) -> None:
    device = dataclasses.replace(plan.device, name="CPU [bold]")
    choices = (Choice(lever="precision", value="[red]", reason="blocks[0] [/] stays"),)
    memory = dataclasses.replace(plan.forecast.memory, peak_module="blocks[0]")
    odd = dataclasses.replace(
        plan,
        device=device,
        choices=choices,
        notes=("[link]",),
        forecast=dataclasses.replace(plan.forecast, memory=memory),
    )
    text = rendered(plan_renderable(odd))
    for shown in ("CPU [bold]", "[red]: blocks[0] [/] stays", "in module blocks[0]", "- [link]"):
        assert shown in text


# --- measurement


def test_predicted_stands_beside_measured_with_the_difference(plan: Plan, measurement: Measurement) -> None:
    """Reported in keras-team/keras-hub#1628, MIC-DKFZ/nnUNet#173, MIC-DKFZ/nnUNet#1152."""
    text = rendered(measurement_renderable(plan, measurement))
    # 560 - 561 = -1 MiB, 1/561 = 0.178 %
    assert row(text, "allocated peak, training")[1:] == ["560.0 MiB", "561.0 MiB", "-1.000 MiB", "-0.18 %"]
    assert row(text, "allocated peak, evaluation")[1:] == ["-", "310.0 MiB"]  # not predicted
    assert row(text, "process RSS peak")[1:] == ["-", "1.020 GiB"]  # 1044 / 1024 = 1.0195


def test_the_corrected_prediction_stands_below_the_raw_one(plan: Plan, measurement: Measurement) -> None:
    corrected = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, correction_bytes=2 * MIB))
    text = rendered(measurement_renderable(corrected, measurement))
    assert row(text, "allocated peak, training, raw")[1:] == ["560.0 MiB", "561.0 MiB", "-1.000 MiB", "-0.18 %"]
    assert row(text, "allocated peak, training, corrected")[1:] == ["562.0 MiB", "561.0 MiB", "+1.000 MiB", "+0.18 %"]


def test_of_a_gpu_the_corrected_prediction_is_one_of_allocated_bytes(plan: Plan, measurement: Measurement) -> None:
    memory = dataclasses.replace(plan.forecast.memory, peak_reserved_bytes=640 * MIB, minimum_feasible_bytes=600 * MIB)
    forecast = dataclasses.replace(plan.forecast, memory=memory, correction_bytes=1 * MIB)
    corrected = dataclasses.replace(plan, forecast=forecast)
    text = rendered(measurement_renderable(corrected, measurement))
    assert row(text, "allocated peak, training, corrected")[1:] == ["561.0 MiB", "561.0 MiB", "0 B", "0.00 %"]
    assert row(rendered(plan_renderable(corrected)), "least reserved, corrected")[1] == "601.0 MiB"  # 600 + 1


def test_use_of_the_budget_and_step_time_are_shown(plan: Plan, measurement: Measurement) -> None:
    text = in_one_line(rendered(measurement_renderable(plan, measurement), width=80))
    # 561 / 700 = 80.14 %
    assert "peak allocated 561.0 MiB of 700.0 MiB (80.1 %): fits, 139.0 MiB left" in text
    assert "812 ms per optimizer step" in text


def test_after_a_contest_the_winner_is_named_and_every_time_shown(plan: Plan, measurement: Measurement) -> None:
    fused = dataclasses.replace(plan.candidate, optimizer_implementation="fused")
    timed = tuple(
        TimedPlan(
            candidate=each,
            predicted_step_seconds=0.4,
            measured_step_seconds=seconds,
            measured_peak_allocated_bytes=310 * MIB,
        )
        for each, seconds in ((plan.candidate, 0.5), (fused, None))
    )
    text = rendered(measurement_renderable(plan, dataclasses.replace(measurement, timed_plans=timed)))
    assert f"{plan.candidate.label} (the fastest of 2 that were timed)" in in_one_line(text)
    assert "fused optimizer" in text and "500 ms" in text
    assert "that were timed" not in rendered(measurement_renderable(plan, measurement))


def test_a_measured_peak_over_the_budget_says_so(plan: Plan, measurement: Measurement) -> None:
    more = dataclasses.replace(measurement, measured_evaluation_peak_bytes=750 * MIB)
    text = in_one_line(rendered(measurement_renderable(plan, more)))
    assert "does not fit, 50.00 MiB over" in text


def test_operator_times_are_per_step(plan: Plan, measurement: Measurement) -> None:
    text = rendered(measurement_renderable(plan, measurement))
    # two profiled steps: 0.61 s and 400 calls are 305 ms and 200 calls per step
    assert row(text, "aten::addmm")[1:] == ["305 ms", "200"]


def test_what_was_not_measured_has_no_row(plan: Plan, measurement: Measurement) -> None:
    less = dataclasses.replace(
        measurement, measured_evaluation_peak_bytes=None, measured_peak_rss_bytes=None, costliest_ops=()
    )
    text = rendered(measurement_renderable(plan, less), width=80)
    assert "evaluation step" not in text
    assert "RSS" not in text
    assert "Costliest" not in text


# --- terminals


@pytest.mark.parametrize("width", [80, 120, 200])
def test_nothing_is_cut_off_at_usual_widths(plan: Plan, measurement: Measurement, width: int) -> None:
    for renderable in (plan_renderable(plan), measurement_renderable(plan, measurement)):
        text = rendered(renderable, width=width)
        assert "\u2026" not in text
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_a_terminal_without_unicode_gets_ascii(plan: Plan, measurement: Measurement) -> None:
    raw = io.BytesIO()
    console = Console(width=80, file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), color_system=None)
    render_plan(plan, console=console)
    render_measurement(plan, measurement, console=console)
    assert b"560.0 MiB" in raw.getvalue()


def test_without_a_console_the_report_goes_to_standard_output(
    plan: Plan, measurement: Measurement, capsys: pytest.CaptureFixture[str]
) -> None:
    render_plan(plan)
    render_measurement(plan, measurement)
    printed = capsys.readouterr().out
    assert "MemFit plan" in printed
    assert "MemFit warm-up" in printed
