"""``memfit plan`` of a user's own functions: what it says, in text and as JSON, and with which exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from lightning_memfit.cli.arguments import BAD_REQUEST, CANNOT_TELL, DOES_NOT_FIT, FITS
from lightning_memfit.units import GIB, MIB

Plan = Callable[..., Any]


def test_a_module_that_fits_is_said_to_fit_with_its_bracket_anatomy_and_decisions(plan: Plan) -> None:
    ran = plan("lit", "--device", "a100-40gb", "--effective-batch-size", "8")
    assert ran.code == FITS, ran.err
    lines = ran.out.splitlines()
    assert lines[0].startswith("a100-40gb ─")
    assert lines[1].startswith("fits: ") and lines[1].endswith(" of 36.01 GiB budget")
    assert "effective batch 8 = 2 accumulated batches x 4 samples" in ran.out
    for words in (
        "predicted to survive in", "where there is room: reserved and the context (predicted)", "optimizer states",
        "peak in the", "Decisions, why, and what they cost", "assumed rates", "not in this machine",
    ):  # fmt: skip
        assert words in ran.out
    assert "measured" not in ran.out
    assert all(line == line.rstrip() for line in lines)


def test_what_the_users_code_prints_goes_beside_the_document(plan: Plan) -> None:
    ran = plan("lit", "--device", "a100-40gb", "--json")
    assert ran.document["exit_code"] == ran.code == FITS
    assert "imported" in ran.err and "made" in ran.err


def test_the_document_has_these_keys_and_sizes_add_up(plan: Plan) -> None:
    document = plan("lit", "--device", "a100-40gb", "--json").document
    assert set(document) == {"schema_version", "lightning_memfit", "exit_code", "subject", "notes", "devices"}
    (found,) = document["devices"]
    assert set(found) == {
        "asked", "device", "verdict", "reason", "budget_bytes", "missing_bytes", "predicted", "rates", "explanation",
        "catalogue_with_room", "plan",
    }  # fmt: skip
    predicted = found["predicted"]
    assert found["verdict"] == "fits" and found["rates"] == "assumed"
    # 8 x 64 + 64 x 8 weights.
    assert predicted["num_parameters"] == 1024
    assert sum(predicted["by_category"].values()) == predicted["peak_allocated_bytes"]
    assert predicted["minimum_feasible_bytes"] <= predicted["peak_reserved_bytes"]
    low, high = predicted["device_total_bytes"]["low"], predicted["device_total_bytes"]["high"]
    context = found["device"]["context_low_bytes"], found["device"]["context_high_bytes"]
    assert (low, high) == tuple(predicted["peak_reserved_bytes"] + each for each in context)
    assert found["plan"]["request"]["effective_batch_size"] == 4


def test_what_does_not_fit_is_one_and_says_what_would_help(plan: Plan) -> None:
    ran = plan("lit", "--device", "a100-40gb", "--budget", "1MiB", "--json")
    assert ran.code == DOES_NOT_FIT
    (found,) = ran.document["devices"]
    assert found["verdict"] == "does not fit" and found["plan"] is None
    assert found["budget_bytes"] == MIB
    assert found["missing_bytes"] == found["predicted"]["minimum_feasible_bytes"] - MIB
    assert "What would help:" in found["explanation"]
    text = plan("lit", "--device", "a100-40gb", "--budget", "1MiB").out
    assert "does not fit: " in text and "too much" in text and "What would help:" in text
    assert "(predicted, least reserved)" in text


def test_a_model_that_is_too_large_is_told_which_gpus_have_room(plan: Plan) -> None:
    ran = plan("wide", "--device", "t4", "--optimizer-states", "as-configured", "--json")
    assert ran.code == DOES_NOT_FIT
    (found,) = ran.document["devices"]
    # 2 x 8 x 2^28 weights of 4 bytes: 16 GiB, and as much for gradients: more than a T4 has, less than an H200.
    assert found["predicted"]["by_category"]["parameters"] == 16 * GIB
    assert "h200" in found["catalogue_with_room"] and "t4" not in found["catalogue_with_room"]
    assert "of the catalogue, by this forecast: " in plan("wide", "--device", "t4").out


@pytest.mark.parametrize("budget", [None, "20GiB"])
def test_of_a_gpu_whose_context_is_not_known_only_a_given_budget_tells(plan: Plan, budget: str | None) -> None:
    ran = plan("triple", "--device", "mi300x", *(() if budget is None else ("--budget", budget)), batch="4x8")
    assert ran.code == (CANNOT_TELL if budget is None else FITS)
    if budget is None:
        assert "cannot tell: what the context takes on AMD Instinct MI300X" in ran.out.replace("\n", " ")
        assert "Give --budget" in ran.out


def test_a_step_that_cannot_be_traced_is_three(plan: Plan) -> None:
    ran = plan("masked", "--device", "t4", "--json", batch="4x8")
    assert ran.code == CANNOT_TELL
    (found,) = ran.document["devices"]
    assert found["verdict"] == "cannot tell"
    assert found["reason"].startswith("one training step cannot be traced without running it")
    assert "--real" in found["reason"]
    assert found["predicted"] is None and found["plan"] is None


def test_a_gpu_of_this_machine_that_is_not_there_cannot_be_told(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    ran = plan("triple", "--device", "cuda:0", "--device", "t4", batch="4x8")
    assert ran.code == CANNOT_TELL
    assert "torch finds no GPU that this process can use" in ran.out.replace("\n", " ")
    assert "fits: " in ran.out


def test_a_failure_to_fit_outweighs_what_cannot_be_told(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    ran = plan("triple", "--device", "cuda:0", "--device", "t4", "--budget", "1KiB", batch="4x8")
    assert ran.code == DOES_NOT_FIT


def test_a_device_that_is_asked_for_twice_is_planned_once(plan: Plan) -> None:
    ran = plan("triple", "--device", "a100-40gb", "--device", "A100 SXM4 40GB", "--device", "t4", "--json", batch="4x8")
    assert [each["asked"] for each in ran.document["devices"]] == ["a100-40gb", "t4"]
    assert ran.document["notes"] == ["'A100 SXM4 40GB' is 'a100-40gb', asked for twice: planned once"]


def test_levers_that_are_given_are_pinned(plan: Plan) -> None:
    ran = plan(
        "lit", "--device", "a100-40gb", "--effective-batch-size", "8", "--micro-batch-size", "2", "--precision",
        "bf16-mixed", "--optimizer-states", "as-configured", "--optimizer-implementation", "single-tensor",
        "--activation-checkpointing", "none", "--headroom", "0", "--json",
    )  # fmt: skip
    assert ran.code == FITS, ran.err
    chosen = ran.document["devices"][0]["plan"]
    candidate = chosen["forecast"]["candidate"]
    assert candidate["precision"] == "bf16-mixed"
    assert candidate["split"]["slice_sizes"] == [2, 2]
    assert candidate["optimizer_implementation"] == "single-tensor"
    assert chosen["budget"]["headroom_bytes"] == 0


def test_the_host_can_be_planned_for_too(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_memfit import forecasting
    from lightning_memfit.application import outcomes

    def without_probing(*positional: Any, **named: Any) -> Any:
        return forecasting.make_plans(*positional, **named, probe_operators=False)

    monkeypatch.setattr(outcomes, "make_plans", without_probing)
    monkeypatch.setattr(forecasting, "rates_of", lambda spec, cache_dir: None)
    ran = plan("triple", "--device", "cpu", "--json", batch="4x8")
    (found,) = ran.document["devices"]
    assert ran.code == FITS and found["predicted"]["peak_reserved_bytes"] is None
    assert found["predicted"]["device_total_bytes"] is None and found["rates"] is None
    assert "cores)" in plan("triple", "--device", "cpu", batch="4x8").out


BAD = {
    "no batch": (("--model", "models_of_a_user:lit"), "--model needs --batch"),
    "batch without model": (("--batch", "4x8"), "--batch goes with --model"),
    "two things to plan": (
        ("--model", "models_of_a_user:lit", "--batch", "4x8", "model=gpt"), "are two things to plan. Give one of them",
    ),
    "unknown device": (("--model", "a:b", "--batch", "4x8", "--device", "a1000"), "is not in the catalogue of GPUs"),
    "several devices of that name": (("--model", "a:b", "--batch", "4x8", "--device", "a100"), "could mean 4 GPUs"),
    "no size": (("--model", "a:b", "--batch", "4x8", "--budget", "lots", "--device", "t4"), "--budget='lots' is not a"),
    "no count": (("--model", "a:b", "--batch", "4x8", "--effective-batch-size", "0", "--device", "t4"), "at least 1"),
    "missing function": (("--model", "models_of_a_user:lti", "--batch", "4x8"), "The nearest names: lit"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_request_that_cannot_be_used_is_two_with_a_way_out(memfit: Plan, name: str) -> None:
    words, message = BAD[name]
    ran = memfit("plan", *words)
    assert ran.code == BAD_REQUEST
    assert message in ran.err and "Traceback" not in ran.err and ran.out == ""


def test_a_batch_that_does_not_form_the_effective_batch_names_its_neighbours(plan: Plan) -> None:
    ran = plan("lit", "--device", "t4", "--effective-batch-size", "10", "--json")
    assert ran.code == BAD_REQUEST
    assert ran.document["error"] == {
        "kind": "ConfigurationError",
        "message": "effective_batch_size=10 is not a multiple of the batch of 4 samples. Nearest: 8 and 12.",
    }
    assert ran.document["devices"] == [] and ran.document["exit_code"] == BAD_REQUEST


def test_patterns_that_match_nothing_are_a_bad_request(plan: Plan) -> None:
    ran = plan("lit", "--device", "t4", "--activation-checkpointing", "layers.*")
    assert ran.code == BAD_REQUEST and "layers.*" in ran.err


def test_running_out_of_memory_here_is_no_verdict_on_the_device(plan: Plan) -> None:
    ran = plan("out_of_memory", "--device", "t4", batch="4x8")
    assert ran.code == CANNOT_TELL
    assert "this machine ran out of memory (OutOfMemoryError: out of memory)" in ran.err


def test_what_is_not_foreseen_is_no_verdict_either(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_memfit.application import outcomes

    def broken(*positional: Any, **named: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(outcomes, "make_plans", broken)
    ran = plan("triple", "--device", "t4", batch="4x8")
    assert ran.code == CANNOT_TELL
    assert "KeyError: 'lost'. This is not foreseen" in ran.err and "Traceback" not in ran.err
    assert "Traceback" in plan("triple", "--device", "t4", "--debug", batch="4x8").err


def test_the_folder_is_importable_only_while_the_command_runs(plan: Plan) -> None:
    before = list(sys.path)
    plan("triple", "--device", "t4", batch="4x8")
    assert sys.path == before
