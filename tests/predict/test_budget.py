"""How the budget is formed: every number by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError
from lightning_memfit.hardware.catalog import catalog_device
from lightning_memfit.hardware.device import DeviceSpec, Neighbour
from lightning_memfit.plan import PlanRequest
from lightning_memfit.predict.budget import form_budget, host_budget
from lightning_memfit.units import GIB, MIB

HOST = DeviceSpec(
    name="Example CPU",
    kind="cpu",
    capacity_bytes=10 * GIB,
    available_bytes=10 * GIB - 400 * MIB,
    process_bytes=400 * MIB,
    cores=2,
)
SMALL = dataclasses.replace(
    HOST,
    capacity_bytes=1 * GIB,
    available_bytes=624 * MIB,
    limit_bytes=1 * GIB,
    limit_source="memory.max",
)
GPU = DeviceSpec(
    name="Example GPU",
    kind="cuda",
    capacity_bytes=10 * GIB,
    available_bytes=8 * GIB,
    process_bytes=2 * GIB,
    total_bytes=12 * GIB,
    context_low_bytes=500 * MIB,
    context_high_bytes=700 * MIB,
    neighbours=(Neighbour(pid=7, held_bytes=1 * GIB), Neighbour(pid=8, held_bytes=None)),
)


def test_what_a_run_on_gpus_may_keep_on_the_host_ends_at_the_limit_of_its_container_less_headroom() -> None:
    """Reported in deepspeedai/DeepSpeed#1891."""
    assert host_budget(HOST) == 10 * GIB - 400 * MIB - 512 * MIB  # 5 % of 10 GiB
    assert host_budget(SMALL) == (624 - 256) * MIB  # of a limit of 1 GiB, and 256 MiB are the least headroom
    assert host_budget(dataclasses.replace(SMALL, available_bytes=100 * MIB)) == 0


def test_without_a_budget_the_device_less_non_torch_and_five_percent() -> None:
    """Reported in Lightning-AI/pytorch-lightning#21154, and by others.

    ludwig-ai/ludwig#3958, OpenNMT/OpenNMT-tf#821, jax-ml/jax#13428, MIC-DKFZ/nnUNet#30, vllm-project/vllm#7256.
    """
    budget = form_budget(HOST, PlanRequest(), resident_bytes=100 * MIB)
    # non-torch: 400 - 100 = 300 MiB; headroom: 5 % of 10240 MiB = 512 MiB; 10240 - 300 - 512 = 9428 MiB
    assert budget.non_torch_bytes == 300 * MIB
    assert budget.headroom_bytes == 512 * MIB
    assert budget.budget_bytes == 9428 * MIB
    assert budget.capacity_bytes == 10 * GIB
    assert budget.reason == (
        "10.00 GiB available or held by this process - 300.0 MiB held outside the model (interpreter, libraries, data) "
        "- 512.0 MiB headroom (5 %)"
    )


def test_on_a_small_device_at_least_256_mib_stay_free_and_the_limit_is_named() -> None:
    budget = form_budget(SMALL, PlanRequest(), resident_bytes=100 * MIB)
    # 5 % of 1024 MiB would be 51 MiB; 1024 - 300 - 256 = 468 MiB
    assert budget.headroom_bytes == 256 * MIB
    assert budget.budget_bytes == 468 * MIB
    assert budget.reason == (
        "1.000 GiB available or held by this process (cgroup limit 1.000 GiB in memory.max) - 300.0 MiB held outside "
        "the model (interpreter, libraries, data) - 256.0 MiB headroom (the least)"
    )


def test_a_headroom_asked_for_replaces_the_default() -> None:
    budget = form_budget(HOST, PlanRequest(headroom=1 * GIB), resident_bytes=400 * MIB)
    assert budget.non_torch_bytes == 0
    assert budget.budget_bytes == 9 * GIB
    assert budget.reason.endswith("- 1.000 GiB headroom (as asked)")


def test_a_given_budget_is_taken_as_it_is() -> None:
    budget = form_budget(HOST, PlanRequest(budget=700 * MIB), resident_bytes=100 * MIB)
    assert budget.budget_bytes == 700 * MIB
    assert budget.headroom_bytes == 0
    assert budget.non_torch_bytes == 300 * MIB
    assert budget.reason == "as given"


def test_a_headroom_asked_for_comes_off_a_given_budget() -> None:
    """Reported in Lightning-AI/pytorch-lightning#21154, ludwig-ai/ludwig#3958, OpenNMT/OpenNMT-tf#821."""
    budget = form_budget(HOST, PlanRequest(budget=700 * MIB, headroom=50 * MIB), resident_bytes=0)
    assert budget.budget_bytes == 650 * MIB
    assert budget.headroom_bytes == 50 * MIB
    assert budget.reason == "700.0 MiB as given - 50.00 MiB headroom (as asked)"


def test_a_budget_beyond_the_device_is_allowed_and_said() -> None:
    budget = form_budget(SMALL, PlanRequest(budget=2 * GIB), resident_bytes=100 * MIB)
    assert budget.budget_bytes == 2 * GIB
    assert budget.reason == (
        "as given; more than the device can hold: 1.000 GiB available or held by this process (cgroup limit 1.000 GiB "
        "in memory.max) - 300.0 MiB held outside the model"
    )


def test_more_torch_bytes_than_the_process_holds_leave_no_negative_non_torch() -> None:
    # Memory that was allocated and never touched is not resident.
    assert form_budget(HOST, PlanRequest(), resident_bytes=2 * GIB).non_torch_bytes == 0


def test_a_headroom_as_large_as_the_given_budget_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        form_budget(HOST, PlanRequest(budget=700 * MIB, headroom=700 * MIB), resident_bytes=0)
    assert str(caught.value) == (
        "headroom=700.0 MiB leaves nothing of budget=700.0 MiB. Ask for less headroom or a larger budget."
    )


def test_a_headroom_as_large_as_the_device_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        form_budget(HOST, PlanRequest(headroom=20 * GIB), resident_bytes=400 * MIB)
    assert str(caught.value) == (
        "headroom=20.00 GiB leaves nothing on Example CPU: 10.00 GiB available or held by this process - 0 B held "
        "outside the model (interpreter, libraries, data) leave 10.00 GiB. Ask for less than 10.00 GiB of headroom."
    )


def test_a_full_device_has_no_feasible_plan() -> None:
    full = dataclasses.replace(HOST, capacity_bytes=500 * MIB, available_bytes=100 * MIB)
    with pytest.raises(NoFeasiblePlanError) as caught:
        form_budget(full, PlanRequest(), resident_bytes=100 * MIB)
    assert str(caught.value) == (
        "budget='auto' leaves nothing on Example CPU: 500.0 MiB available or held by this process - 300.0 MiB held "
        "outside the model (interpreter, libraries, data) leave 200.0 MiB, less 256.0 MiB of headroom. End other "
        "processes, raise the memory limit, load less data before training, or set headroom= lower."
    )
    # 200 - 256 = -56 MiB, and the model's own 100 MiB have to fit
    assert caught.value.budget_bytes == -56 * MIB
    assert caught.value.missing_bytes == 156 * MIB


sizes = st.integers(min_value=0, max_value=4 * GIB)


@given(available=sizes, process=sizes, resident=sizes)
def test_a_default_budget_and_its_parts_add_up_to_the_capacity(available: int, process: int, resident: int) -> None:
    device = dataclasses.replace(
        HOST, capacity_bytes=available + process, available_bytes=available, process_bytes=process
    )
    try:
        budget = form_budget(device, PlanRequest(), resident_bytes=resident)
    except NoFeasiblePlanError:
        assert available + min(process, resident) <= max(256 * MIB, (available + process) // 20)
        return
    assert budget.budget_bytes > 0
    assert budget.budget_bytes + budget.non_torch_bytes + budget.headroom_bytes == budget.capacity_bytes


# --- GPUs


def test_on_a_gpu_the_most_that_the_context_may_take_is_left_to_it() -> None:
    budget = form_budget(GPU, PlanRequest(), resident_bytes=5 * GIB)
    # 10240 - 700 - 5 % of 10240 (512) = 9028 MiB, whatever the model holds in host memory
    assert budget.non_torch_bytes == 700 * MIB
    assert budget.budget_bytes == 9028 * MIB
    assert budget.reason == (
        "10.00 GiB free or held by this process - 700.0 MiB for the CUDA context and libraries (from 500.0 MiB) "
        "- 512.0 MiB headroom (5 %)"
    )


def test_what_torch_may_reserve_is_named() -> None:
    budget = form_budget(dataclasses.replace(GPU, memory_fraction=0.8), PlanRequest(), resident_bytes=0)
    assert budget.reason.startswith("10.00 GiB free or held by this process (torch may reserve 0.8 of 12.00 GiB) - ")


def test_an_absent_gpu_is_assumed_to_be_empty() -> None:
    budget = form_budget(catalog_device("a100-40gb"), PlanRequest(), resident_bytes=0)
    # torch's total 42298834944; context at most 1450 MiB = 1520435200; 5 % = 2114941747
    assert budget.budget_bytes == 42298834944 - 1520435200 - 2114941747
    assert budget.reason == (
        "39.39 GiB in all, as torch reports such a GPU (assumed: nothing else runs on it) - 1.416 GiB for the CUDA "
        "context and libraries (from 1.401 GiB) - 1.970 GiB headroom (5 %)"
    )


def test_what_is_not_known_of_an_absent_gpu_is_said() -> None:
    budget = form_budget(catalog_device("a40"), PlanRequest(), resident_bytes=0)
    assert budget.reason.startswith(
        "43.68 GiB in all, the least that torch may report for such a GPU (assumed: nothing else runs on it) - "
        "1.416 GiB for the CUDA context and libraries (from 273.8 MiB), assumed - "
    )
    assert (
        " - 0 B for the context, which is not known - "
        in form_budget(catalog_device("mi300x"), PlanRequest(), resident_bytes=0).reason
    )


def test_a_given_budget_beyond_a_gpu_is_said() -> None:
    budget = form_budget(GPU, PlanRequest(budget=20 * GIB), resident_bytes=0)
    assert budget.reason == (
        "as given; more than the device can hold: 10.00 GiB free or held by this process - 700.0 MiB for the context"
    )


def test_a_full_gpu_names_the_process_that_holds_most() -> None:
    """Reported in jax-ml/jax#13428: who holds the memory is not said."""
    full = dataclasses.replace(GPU, capacity_bytes=900 * MIB, available_bytes=200 * MIB)
    with pytest.raises(NoFeasiblePlanError) as caught:
        form_budget(full, PlanRequest(), resident_bytes=0)
    assert str(caught.value) == (
        "budget='auto' leaves nothing on Example GPU: 900.0 MiB free or held by this process - 700.0 MiB for the CUDA "
        "context and libraries (from 500.0 MiB) leave 200.0 MiB, less 256.0 MiB of headroom. End other processes on "
        "the GPU (process 7 holds 1.000 GiB), or set headroom= lower."
    )


def test_a_full_gpu_without_known_neighbours_and_one_that_is_too_small() -> None:
    full = dataclasses.replace(GPU, capacity_bytes=900 * MIB, neighbours=None)
    with pytest.raises(NoFeasiblePlanError, match="End other processes on the GPU, or set headroom= lower"):
        form_budget(full, PlanRequest(), resident_bytes=0)
    with pytest.raises(NoFeasiblePlanError, match="Plan for a larger GPU, or set headroom= lower"):
        form_budget(dataclasses.replace(full, is_present=False), PlanRequest(), resident_bytes=0)
