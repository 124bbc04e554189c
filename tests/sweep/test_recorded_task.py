"""The task of a job with its record: whatever way it ends, whichever process it is sent to."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from lightning_memfit.errors import NoFeasiblePlanError, SweepError
from lightning_memfit.no_fit import NoFit, no_fit_record, tell_no_fit
from lightning_memfit.plan_file import to_yaml
from lightning_memfit.sweep.config_digest import digest_of
from lightning_memfit.sweep.job_end import JobEnd, read_job_end
from lightning_memfit.sweep.recorded_task import RecordedTask
from tests.sweep.conftest import composing

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a task as Hydra does a job, in the folder ``7``; the launcher counted it as number 0."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict

    before = HydraConfig.instance().cfg
    with composing(tmp_path / "conf", "a: 1", "a=2", "hydra.sweep.subdir='7'") as (config, _):
        with open_dict(config):
            config.hydra.runtime.output_dir = str(tmp_path / "7")
            config.hydra.job.num = 0
        (tmp_path / "7").mkdir()
        HydraConfig.instance().set_config(config)

        def of(task: Callable[[Any], Any], numbers: dict[str, int] | None = None) -> Any:
            recorded = RecordedTask(task)
            recorded.numbers = {"7": 5} if numbers is None else numbers
            return recorded(OmegaConf.masked_copy(config, ["a"]))

        try:
            yield of
        finally:
            HydraConfig.instance().cfg = before


def ended(tmp_path: Path) -> JobEnd:
    end = read_job_end(tmp_path / "7")
    assert end is not None
    return end


def test_a_number_that_is_returned_is_the_objective(run: Run, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    assert run(lambda config: config.a / 4) == 0.5
    end = ended(tmp_path)
    assert (end.status, end.objective, end.number, end.overrides) == ("completed", 0.5, 5, ("a=2",))
    assert end.config_digest == digest_of(OmegaConf.create({"a": 2}))
    assert end.seconds is not None and 0 <= end.seconds < 60


@pytest.mark.parametrize("value", [None, True, "0.5", [1.0], {"loss": 1.0}])
def test_what_is_no_plain_number_is_no_objective(run: Run, tmp_path: Path, value: Any) -> None:
    assert run(lambda config: value) == value
    assert ended(tmp_path).objective is None


def test_the_job_sees_its_place_in_the_sweep_and_not_in_the_launches(run: Run) -> None:
    from hydra.core.hydra_config import HydraConfig

    assert run(lambda config: HydraConfig.get().job.num) == 5
    # One that is not told keeps the launcher's.
    assert run(lambda config: HydraConfig.get().job.num, {}) == 5


def raises(error: BaseException) -> Callable[[Any], Any]:
    def task(config: Any) -> None:
        raise error

    return task


def test_an_error_is_recorded_and_raised_as_it_is(run: Run, tmp_path: Path) -> None:
    error = ValueError("the data is missing\nmore")
    with pytest.raises(ValueError) as raised:
        run(raises(error))
    assert raised.value is error
    assert (ended(tmp_path).status, ended(tmp_path).reason) == ("failed", "ValueError: the data is missing")


def test_the_whole_traceback_of_a_failed_job_is_in_its_folder_and_in_its_log(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def instantiates(config: Any) -> None:
        try:
            raise TypeError("Net() got an unexpected argument 'wdith'")
        except TypeError as error:
            raise ValueError("Error in call to target 'net.Net':\nTypeError(...)") from error

    with pytest.raises(ValueError):
        run(instantiates)
    cause = "TypeError: Net() got an unexpected argument 'wdith'"
    assert ended(tmp_path).reason == f"ValueError: Error in call to target 'net.Net' ({cause})"
    assert ended(tmp_path).error_file == "job_error.txt"
    text = (tmp_path / "7" / "job_error.txt").read_text()
    for told in (text, caplog.text):
        assert cause in told and "in instantiates" in told and "direct cause" in told
    # A later try that ends well takes it away.
    run(lambda config: 1.0)
    assert ended(tmp_path).error_file is None and not (tmp_path / "7" / "job_error.txt").exists()


def test_a_cause_that_the_error_itself_tells_is_not_told_twice(run: Run, tmp_path: Path) -> None:
    def wraps(config: Any) -> None:
        try:
            raise KeyError("lost")
        except KeyError as error:
            raise ValueError(f"the model raised KeyError: {error}") from error

    with pytest.raises(ValueError):
        run(wraps)
    assert ended(tmp_path).reason == "ValueError: the model raised KeyError: 'lost'"


NO_FIT = NoFeasiblePlanError("No plan fits the budget.\nBudget: ...", budget_bytes=100, best_peak_bytes=130)


def leaves_because_nothing_fits(config: Any) -> None:
    try:
        raise NO_FIT
    except NoFeasiblePlanError:
        raise SystemExit(2) from None


@pytest.mark.parametrize("task", [raises(NO_FIT), leaves_because_nothing_fits])
def test_that_nothing_fits_is_a_result(run: Run, tmp_path: Path, task: Any) -> None:
    assert run(task) is None
    end = ended(tmp_path)
    assert (end.status, end.reason) == ("does not fit", "No plan fits the budget.")
    assert (end.budget_bytes, end.best_peak_bytes, end.missing_bytes) == (100, 130, 30)


def test_what_fails_after_it_was_handled_that_nothing_fits_is_a_failure(run: Run, tmp_path: Path) -> None:
    def does_something_else(config: Any) -> None:
        try:
            raise NO_FIT
        except NoFeasiblePlanError:
            raise ValueError("and fails at it")  # noqa: B904  # as an application may

    with pytest.raises(ValueError):
        run(does_something_else)
    assert (ended(tmp_path).status, ended(tmp_path).reason) == ("failed", "ValueError: and fails at it")


@pytest.mark.parametrize("code", [None, 0])
def test_leaving_with_success_is_the_end_of_the_job_alone(run: Run, tmp_path: Path, code: Any) -> None:
    assert run(raises(SystemExit(code))) is None
    assert ended(tmp_path).status == "completed"


def test_leaving_with_another_code_is_a_failure_of_the_job_alone(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="the job ended with exit code 3"):
        run(raises(SystemExit(3)))
    assert ended(tmp_path).status == "failed"


def test_stopping_the_sweep_is_no_end_of_the_job(run: Run, tmp_path: Path) -> None:
    def leaves_as_lightning_does(config: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise SystemExit(1) from None

    for task in (raises(KeyboardInterrupt()), leaves_as_lightning_does):
        with pytest.raises(KeyboardInterrupt):
            run(task)
    assert read_job_end(tmp_path / "7") is None


class OfTwo(Exception):
    """Cannot be made again of its message alone."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def test_an_error_that_would_break_in_another_process_is_told_in_words(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="OfTwo: lost") as raised:
        run(raises(OfTwo("lost", 3)))
    assert isinstance(raised.value.__cause__, OfTwo)
    assert ended(tmp_path).reason == "OfTwo: lost"


def test_a_run_that_went_on_without_a_plan_does_not_fit(run: Run, tmp_path: Path) -> None:
    def skips(config: Any) -> float:
        folder = tmp_path / "7" / "logs"
        folder.mkdir(exist_ok=True)
        no_fit = NoFit(reason="30 B too much\nmore", budget_bytes=100, best_peak_bytes=130, missing_bytes=30)
        (folder / "no_fit.yaml").write_text(to_yaml(no_fit_record(no_fit)))
        return 9.0

    assert run(skips) == 9.0
    end = ended(tmp_path)
    assert (end.status, end.reason, end.missing_bytes, end.budget_bytes) == ("does not fit", "30 B too much", 30, 100)
    # What is returned in place of an objective is none.
    assert end.objective is None


def test_of_several_runs_in_a_job_the_last_one_counts(run: Run, tmp_path: Path) -> None:
    def twice(config: Any) -> float:
        no_fit, plan = tmp_path / "7" / "no_fit.yaml", tmp_path / "7" / "smaller" / "plan.yaml"
        plan.parent.mkdir()
        no_fit.write_text(to_yaml(no_fit_record(NoFit(reason="x", budget_bytes=1, best_peak_bytes=2, missing_bytes=1))))
        plan.write_text("a plan")
        os.utime(no_fit, ns=(1, 1))
        return 9.0

    run(twice)
    end = ended(tmp_path)
    assert (end.status, end.objective, end.plan_file) == ("completed", 9.0, "smaller/plan.yaml")


def test_that_nothing_fits_is_known_wherever_the_run_writes_its_files(run: Run, tmp_path: Path) -> None:
    no_fit = NoFit(reason="30 B too much", budget_bytes=100, best_peak_bytes=130, missing_bytes=30)

    def skips(config: Any) -> float:
        tell_no_fit(no_fit)  # as the plugin does, whose Trainer writes to another folder
        return 9.0

    assert run(skips) == 9.0
    assert (ended(tmp_path).status, ended(tmp_path).objective) == ("does not fit", None)


def test_an_error_of_a_second_try_is_a_failure(run: Run, tmp_path: Path) -> None:
    def tries_a_smaller_model(config: Any) -> None:
        try:
            raise NO_FIT
        except NoFeasiblePlanError:
            raises(ValueError("no smaller model"))(config)

    with pytest.raises(ValueError, match="no smaller model"):
        run(tries_a_smaller_model)
    assert ended(tmp_path).status == "failed"


def test_a_record_that_cannot_be_read_does_not_say_that_nothing_fits(run: Run, tmp_path: Path) -> None:
    def skips(config: Any) -> float:
        (tmp_path / "7" / "no_fit.yaml").write_text("{")
        return 9.0

    run(skips)
    assert (ended(tmp_path).status, ended(tmp_path).objective) == ("completed", 9.0)


def test_files_of_an_earlier_try_do_not_count(run: Run, tmp_path: Path) -> None:
    logs = tmp_path / "7" / "logs"
    logs.mkdir()
    (logs / "plan.yaml").write_text("earlier")
    (logs / "no_fit.yaml").write_text("reason: earlier\n")
    run(lambda config: 1.0)
    assert (ended(tmp_path).status, ended(tmp_path).plan_file) == ("completed", None)

    def plans(config: Any) -> float:
        (logs / "plan.yaml").write_text("now, and longer")
        return 1.0

    run(plans)
    assert ended(tmp_path).plan_file == "logs/plan.yaml"


def of_a_module(config: Any) -> float:
    """A task that pickle finds by its name."""
    return 1.0


def test_it_can_be_sent_to_other_processes_wherever_the_task_can() -> None:
    recorded = RecordedTask(of_a_module)
    recorded.numbers = {"7": 5}
    assert recorded.__name__ == "of_a_module" and recorded.__doc__ == of_a_module.__doc__
    for sent in (pickle.loads(pickle.dumps(recorded)), cloudpickle.loads(cloudpickle.dumps(recorded))):
        assert sent.numbers == {"7": 5} and sent.task({}) == 1.0
    of_a_script = RecordedTask(lambda config: config["a"])
    assert cloudpickle.loads(cloudpickle.dumps(of_a_script)).task({"a": 3}) == 3
