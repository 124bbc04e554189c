"""Out of memory is recognised in one place, by the texts that torch and its libraries really write."""

from __future__ import annotations

import pickle

import pytest
import torch

from lightning_memfit import errors
from lightning_memfit.errors import MemFitError, NoFeasiblePlanError, StalePlanError, is_out_of_memory
from lightning_memfit.plan import BatchSplit, Candidate, Forecast, MemoryBreakdown
from lightning_memfit.units import MIB

OUT_OF_MEMORY = {
    "CPU allocator, torch 2.13": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 16777216 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "CPU allocator, Windows": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
        "1073741824 bytes."
    ),
    "CUDA caching allocator": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB of which 8.94 MiB is "
        "free."
    ),
    "any text of the right class": torch.OutOfMemoryError("budget of 1048576 bytes is used up"),
    "CUDA driver": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "HIP": RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB."),
    "MPS": RuntimeError("MPS backend out of memory (MPS allocated: 17.94 GB, max allowed: 18.13 GB)."),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuSOLVER": RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    "cuSPARSE": RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    "cuFFT": RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "cuRAND": RuntimeError("CURAND_STATUS_ALLOCATION_FAILED"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "NCCL": RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda error\nLast error:\n"
        "Cuda failure 2 'out of memory'"
    ),
    "XPU": RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "XPU, older": RuntimeError("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)"),
    "oneDNN": RuntimeError("could not create a primitive"),
    "a C++ library": RuntimeError("std::bad_alloc"),
    "Python and numpy": MemoryError("Unable to allocate 8.00 GiB for an array with shape (1073741824,)"),
}

SOMETHING_ELSE = {
    "illegal access": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "no engine of cuDNN": RuntimeError("GET was unable to find an engine to execute this computation"),
    "memory format": RuntimeError("unsupported memory format option Contiguous"),
    "cuBLAS at work": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    "shape": RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x16 and 8x16)"),
    "shared memory": RuntimeError("unable to open shared memory object </torch_1_2> in read-write mode"),
    "the words in another class": ValueError("the feature 'out of memory' is not in the vocabulary"),
    "an interrupt": KeyboardInterrupt(),
    "a missing key": KeyError("out of memory"),
}


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY.keys())
def test_real_out_of_memory_errors_are_recognised(error: BaseException) -> None:
    """Reported in Lightning-AI/pytorch-lightning#6819, and by others.

    awslabs/sockeye#897, mberr/torch-max-mem#14, Lightning-AI/lightning-thunder#1296, pytorch/pytorch#128601.
    """
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", SOMETHING_ELSE.values(), ids=SOMETHING_ELSE.keys())
def test_errors_that_look_alike_are_not(error: BaseException) -> None:
    """Reported in Lightning-AI/pytorch-lightning#6819, and by others.

    awslabs/sockeye#897, mberr/torch-max-mem#14, Lightning-AI/lightning-thunder#1296, pytorch/pytorch#128601.
    """
    assert not is_out_of_memory(error)


def test_the_error_that_this_torch_raises_on_a_host_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)  # 32 PiB: beyond any address space, refused at once
    assert is_out_of_memory(caught.value)


def test_every_error_of_the_package_can_be_caught_as_one() -> None:
    own = [value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__]
    assert len(own) > 5
    assert all(issubclass(error, MemFitError) for error in own)


@pytest.mark.parametrize(("best", "missing"), [(150 * MIB, 50 * MIB), (90 * MIB, 0)])
def test_no_feasible_plan_tells_by_how_much_it_misses(best: int, missing: int) -> None:
    error = NoFeasiblePlanError("nothing fits", budget_bytes=100 * MIB, best_peak_bytes=best)
    assert str(error) == "nothing fits"
    assert (error.budget_bytes, error.best_peak_bytes, error.missing_bytes) == (100 * MIB, best, missing)


def test_a_plan_that_does_not_fit_is_no_out_of_memory_error() -> None:
    assert not is_out_of_memory(NoFeasiblePlanError("no plan fits", budget_bytes=1, best_peak_bytes=2))


SMALLEST = Forecast(
    candidate=Candidate(
        precision="32-true", split=BatchSplit(effective_batch_size=1, loader_batch_size=1, slice_sizes=(1,))
    ),
    memory=MemoryBreakdown(peak_allocated_bytes=5, peak_phase="backward", num_parameters=1),
)


@pytest.mark.parametrize(
    "error",
    [
        NoFeasiblePlanError("No plan fits.", budget_bytes=3, best_peak_bytes=5, smallest=SMALLEST),
        StalePlanError("Not made for this run.", reasons=("batch", "device")),
    ],
)
def test_an_error_can_be_sent_between_processes_with_its_attributes(error: Exception) -> None:
    sent = pickle.loads(pickle.dumps(error))
    assert type(sent) is type(error) and str(sent) == str(error) and vars(sent) == vars(error)
