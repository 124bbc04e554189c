"""Published measurements: what the data says of itself, that networks are the published ones, and the arithmetic."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
import torch

from benchmarks.accuracy_cuda_published import as_json, as_markdown, unexplained
from benchmarks.machine import this_machine
from benchmarks.published_case import OPTIMIZERS, PublishedPrediction, predict, workload_of
from benchmarks.published_judgement import GROUPS, fitting_rows, is_judged, judge, missed_targets, summarise
from benchmarks.published_models import MODELS
from benchmarks.published_models.cached_language import cached_gpt2, padded_words
from benchmarks.published_rows import LISTED, PEAKS, PublishedRow, Setting, published_rows, settings_of
from lightning_memfit.units import GIB, MIB

ROWS = published_rows()

SETTING = Setting(
    model="mlp",
    layers=(("linear", 8), ("ReLU", 8), ("linear", 2), ("Softmax", 2)),
    batch=4,
    shape=16,
    precision="32-true",
    optimizer="adam",
    optimizer_implementation="foreach",
    activation_checkpointing="none",
    micro_batch=None,
    zero_gradients="before forward",
    kept_outputs="into the next forward",
    device="a100-40gb",
)
ROW = PublishedRow(
    id="mlp-01",
    group="mlp",
    title="an MLP",
    setting=SETTING,
    not_rebuilt="",
    measured_bytes=2000 * MIB,
    statistic="device_total",
    grade="A",
    peer_predicted_bytes=None,
    cause="",
    note="",
    source="owner/repo file@version",
)
# One million parameters: 20 bytes for each are 20,000,000 bytes.
PREDICTION = PublishedPrediction(
    peak_allocated_bytes=400 * MIB,
    peak_reserved_bytes=490 * MIB,
    minimum_feasible_bytes=420 * MIB,
    num_parameters=1_000_000,
    peak_phase="optimizer_step",
    peak_op=None,
    seconds=0.1,
)


def test_every_row_says_where_it_is_from_what_was_measured_and_how_well_that_is_described() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.source and row.statistic and row.grade and row.title, row.id


def test_every_row_is_either_rebuilt_or_says_why_not() -> None:
    for row in ROWS:
        assert (row.setting is None) == bool(row.not_rebuilt) == (row.group == LISTED), row.id
    assert {row.group for row in ROWS} == {*GROUPS, LISTED}


def test_all_of_the_perceptrons_and_of_the_peers_own_rows_are_rebuilt() -> None:
    assert sum(row.group == "mlp" for row in ROWS) == 60
    assert sum(row.peer_predicted_bytes is not None for row in ROWS if row.group == "xmem") == 10


def test_runs_that_died_have_no_number_and_all_others_have_one() -> None:
    with PEAKS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert (row["outcome"] == "out of memory") == (row["measured_mib"] == ""), row["id"]
    died = [row for row in ROWS if row.out_of_memory and row.setting is not None]
    assert {row.group for row in died} == {"oom"}


def test_settings_name_models_and_optimizers_that_exist() -> None:
    for setting in settings_of(ROWS):
        assert setting.model == "mlp" or setting.model in MODELS
        assert setting.optimizer in OPTIMIZERS
        assert setting.zero_gradients in ("before forward", "before backward", "in place")
        assert setting.batch % (setting.micro_batch or 1) == 0


def test_every_model_is_of_some_row() -> None:
    assert {setting.model for setting in settings_of(ROWS)} == {"mlp", *MODELS}


def test_no_judged_row_gives_the_constant_that_it_is_judged_by() -> None:
    for row in ROWS:
        if row.group != LISTED and is_judged(row):
            fitting = fitting_rows(row, ROWS)
            assert row not in fitting
            if GROUPS[row.group].context == "half":
                assert not any(is_judged(other) for other in fitting)


@pytest.mark.parametrize("name", MODELS)
def test_a_network_has_as_many_parameters_as_its_authors_say(name: str) -> None:
    with torch.device("meta"):
        network = MODELS[name].make()
    assert sum(parameter.numel() for parameter in network.parameters()) == MODELS[name].parameters


def test_a_perceptron_is_built_layer_by_layer_without_memory() -> None:
    workload = workload_of(SETTING)
    # 16 x 8 + 8 and 8 x 2 + 2.
    assert sum(parameter.numel() for parameter in workload.network.parameters()) == 136 + 18
    assert all(parameter.is_meta for parameter in workload.network.parameters())
    assert [type(layer).__name__ for layer in workload.network.children()] == ["Linear", "ReLU", "Linear", "Softmax"]


def test_a_prediction_knows_the_parameters_and_holds_at_least_the_states() -> None:
    prediction = predict(SETTING, device="cpu")
    assert prediction.num_parameters == 154
    # Parameters, gradients, two states and one list of temporaries, 4 bytes each.
    assert prediction.peak_allocated_bytes >= 20 * 154


def test_gradients_that_are_zeroed_in_place_live_through_the_whole_step() -> None:
    peaks = [
        predict(replace(SETTING, zero_gradients=words, optimizer="sgd", batch=4096), device="cpu").peak_allocated_bytes
        for words in ("before forward", "in place")
    ]
    # Early in the backward those of the last layer, 8 x 2 + 2, are there either way.
    assert peaks[1] - peaks[0] == 4 * (154 - 18)


def test_the_workspace_of_the_measured_environment_is_predicted() -> None:
    with_default, without = (
        predict(replace(SETTING, cublas_workspace=config)).peak_allocated_bytes for config in ("", ":0:0")
    )
    # One for the forward and one for the backward, 8,519,680 bytes each on an A100.
    assert with_default - without == 17_039_360


def test_keys_and_values_keep_the_projection_that_they_are_views_of() -> None:
    with torch.device("meta"):
        _, logits, ((key, value),) = cached_gpt2(layers=1)(padded_words(2, 8))
    assert logits.shape == (2, 8, 50257)
    # 2 texts of 8 tokens, three vectors of 768 numbers each, 4 bytes.
    assert key.untyped_storage().nbytes() == value.untyped_storage().nbytes() == 2 * 8 * 3 * 768 * 4
    assert key.untyped_storage()._cdata == value.untyped_storage()._cdata


def test_texts_shorter_than_the_longest_are_padded() -> None:
    batch = padded_words(2, 4)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[0, 0, 0, 0], [0, 0, -100, -100]]


def test_the_constant_is_the_median_of_the_even_rows_and_errors_are_of_the_bytes_above_it() -> None:
    # Reserved 490 everywhere: 1480, 1500 and 1530 lie beside it in the even rows; their median is 1500.
    even = [replace(ROW, id=f"mlp-{i}", measured_bytes=size * MIB) for i, size in ((0, 1970), (2, 1990), (4, 2020))]
    *_, judged = judge([*even, ROW], {SETTING: PREDICTION})
    assert judged.context_bytes == 1500 * MIB
    assert judged.predicted_bytes == 1990 * MIB
    # 10 MiB too little of the 500 MiB above 1500, and of 2000.
    assert judged.error_above_context == pytest.approx(-0.02)
    assert judged.error == pytest.approx(-0.005)
    assert judged.bracket_bytes == (1920 * MIB, 1990 * MIB)
    assert not judged.in_bracket
    assert judged.naive_bytes == 1500 * MIB + 20_000_000


def test_small_rows_are_judged_by_absolute_error_and_do_not_enter_the_median() -> None:
    even = [replace(ROW, id="mlp-00", measured_bytes=1990 * MIB)]
    small = replace(ROW, id="mlp-03", measured_bytes=1700 * MIB)
    *_, summary = summarise(judge([*even, ROW, small], {SETTING: PREDICTION}))
    # 1500 + 490 against 2000 is a fiftieth of 500, and 290 MiB more than 1700.
    assert (summary.judged, summary.median) == (2, pytest.approx(0.02))
    assert summary.largest_small_bytes == 290 * MIB
    assert missed_targets([summary]) == [
        "missed: MLPs, A100 (GPUMemNet) (device_total): a small row is off by 290.0 MiB, target 16 MiB"
    ]


def test_halves_that_fit_each_other_are_both_judged() -> None:
    rows = [replace(ROW, id=f"cnn-0{i}", group="cnn", measured_bytes=(500 + 10 * i) * MIB) for i in range(1, 5)]
    judged = judge(rows, {SETTING: PREDICTION})
    # 510 and 530 less 490 give 30 to the even rows, 520 and 540 give 40 to the odd ones.
    assert [row.context_bytes // MIB for row in judged] == [40, 30, 40, 30]
    assert all(row.judged for row in judged)


def test_a_prediction_must_be_better_than_the_sources_own() -> None:
    # 490 for 500; the source said 495.
    row = replace(ROW, id="xmem-01", group="xmem", measured_bytes=500 * MIB, peer_predicted_bytes=495 * MIB)
    (summary,) = summarise(judge([row], {SETTING: PREDICTION}))
    assert summary.context_bytes == (0,)
    assert missed_targets([summary]) == [
        "missed: CNNs and distilgpt2, RTX 3060 and 4060 (xMem) (device_total): median 2.00 % is not below the source's "
        "own 1.00 %"
    ]


def test_a_run_that_died_is_right_if_its_least_is_more_than_the_device() -> None:
    died = replace(ROW, id="oom-01", group="oom", measured_bytes=None)
    more = replace(PREDICTION, minimum_feasible_bytes=41 * GIB)
    assert judge([died], {SETTING: more})[0].verdict == "predicted not to fit: right"
    (summary,) = summarise(judge([died], {SETTING: PREDICTION}))
    assert summary.right_verdicts == 0
    assert missed_targets([summary]) == ["missed: runs out of memory (device_total): 1 of 1 said to fit"]


def test_an_error_of_more_than_a_tenth_wants_a_cause() -> None:
    row = replace(ROW, group="bert_large", measured_bytes=1000 * MIB)
    judged = judge([row], {SETTING: PREDICTION})
    assert unexplained(judged) == ["mlp-01"]
    assert unexplained([replace(judged[0], cause="known")]) == []


def test_results_name_the_machine_every_row_and_what_was_left_out() -> None:
    listed = next(row for row in ROWS if row.group == LISTED)
    rows = [replace(ROW, id="mlp-00"), ROW, listed]
    judged = judge(rows, {SETTING: PREDICTION})
    plain = json.loads(json.dumps(as_json(rows, judged, summarise(judged), this_machine())))
    assert [row["id"] for row in plain["rows"]] == ["mlp-00", "mlp-01"]
    assert plain["not_rebuilt"][0]["reason"] == listed.not_rebuilt
    text = as_markdown(rows, judged, summarise(judged), this_machine())
    assert listed.not_rebuilt in text and "mlp-00 an MLP (fitted)" in text
