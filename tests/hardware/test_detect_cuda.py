"""What a GPU leaves to this process, through a driver that is made up: every number by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.hardware.catalog import any_context_bytes, find_gpu
from lightning_memfit.hardware.detect import detect_again, detect_device
from lightning_memfit.hardware.detect_cuda import GpuFacts, detect_gpu
from lightning_memfit.hardware.device import DeviceSpec, Neighbour
from lightning_memfit.units import GIB, MIB

HOST = DeviceSpec(
    name="Example CPU",
    kind="cpu",
    capacity_bytes=8 * GIB,
    available_bytes=7 * GIB,
    process_bytes=1 * GIB,
    cores=6,
)
OWN = 4242
A100 = GpuFacts(
    name="NVIDIA A100-SXM4-40GB",
    total_bytes=42298834944,
    uuid="aaaa",
    compute_capability=(8, 0),
    gfx=None,
    is_integrated=False,
)


@dataclasses.dataclass
class FakeGpu:
    """One GPU and who is on it."""

    facts: GpuFacts = A100
    free: int = 30 * GIB
    reserved: int = 2 * GIB
    fraction: float | None = 1.0
    held: tuple[Neighbour, ...] | None = (Neighbour(pid=OWN, held_bytes=2 * GIB + 500 * MIB),)
    spilling: bool = False


@dataclasses.dataclass
class FakeDriver:
    """GPUs in torch's order."""

    gpus: list[FakeGpu]
    settings: str | None = None
    current: int = 0

    def device_count(self) -> int:
        return len(self.gpus)

    def current_index(self) -> int:
        return self.current

    def facts(self, index: int) -> GpuFacts:
        return self.gpus[index].facts

    def free_bytes(self, index: int) -> int:
        return self.gpus[index].free

    def reserved_bytes(self, index: int) -> int:
        return self.gpus[index].reserved

    def memory_fraction(self, index: int) -> float | None:
        return self.gpus[index].fraction

    def processes(self, uuid: str) -> tuple[Neighbour, ...] | None:
        return next(gpu.held for gpu in self.gpus if gpu.facts.uuid == uuid)

    def spills(self, uuid: str | None) -> bool:
        return any(gpu.spilling for gpu in self.gpus if gpu.facts.uuid == uuid)

    def allocator_settings(self) -> str | None:
        return self.settings

    def pid(self) -> int:
        return OWN


def detected(gpu: FakeGpu, **driver: object) -> DeviceSpec:
    return detect_gpu(None, driver=FakeDriver([gpu], **driver), host=HOST)  # type: ignore[arg-type]


def test_the_capacity_is_what_is_free_and_what_this_process_holds_and_never_the_total() -> None:
    """Reported in hydra-ecosystem/hydra#1331: jobs of a sweep share a GPU."""
    device = detected(
        FakeGpu(held=(Neighbour(pid=OWN, held_bytes=2 * GIB + 500 * MIB), Neighbour(pid=9, held_bytes=6 * GIB)))
    )
    assert device.available_bytes == 30 * GIB
    # reserved 2 GiB and a context of 500 MiB
    assert device.process_bytes == 2 * GIB + 500 * MIB
    assert device.capacity_bytes == 32 * GIB + 500 * MIB
    assert device.total_bytes == 42298834944
    assert device.neighbours == (Neighbour(pid=9, held_bytes=6 * GIB),)
    # GPUMemNet: cuBLAS adds up to 213 MiB
    assert (device.context_low_bytes, device.context_high_bytes) == (500 * MIB, 713 * MIB)
    assert device.unknowns == ()
    assert device.cores == 6
    assert (device.key, device.uuid, device.is_present) == ("a100-40gb", "aaaa", True)


def test_rates_and_backends_of_a_known_gpu_come_from_the_catalogue() -> None:
    device = detected(FakeGpu())
    model = find_gpu("a100-40gb")
    assert device.peak_flops == model.peak_flops
    assert device.bandwidth_bytes_per_second == 1555 * 10**9
    assert device.attention_backends == ("flash", "efficient", "cudnn", "math")


def test_without_nvml_the_context_is_the_catalogues_and_neighbours_are_unknown() -> None:
    device = detected(FakeGpu(held=None))
    # the A100's context takes 1435 to 1450 MiB; the low end counts as already taken
    assert device.process_bytes == 2 * GIB + 1435 * MIB
    assert (device.context_low_bytes, device.context_high_bytes) == (1435 * MIB, 1450 * MIB)
    assert device.neighbours is None
    assert device.unknowns == ("neighbours",)


def test_a_context_can_have_taken_no_more_than_what_is_gone() -> None:
    # 100 MiB are neither free nor reserved: no context of 1435 MiB fits in there
    gpu = FakeGpu(held=None, free=A100.total_bytes - 2 * GIB - 100 * MIB)
    assert detected(gpu).process_bytes == 2 * GIB + 100 * MIB
    assert detected(gpu).capacity_bytes == A100.total_bytes


def test_in_a_container_that_lists_the_hosts_processes_none_is_taken_for_a_neighbour() -> None:
    device = detected(FakeGpu(held=(Neighbour(pid=1, held_bytes=2 * GIB), Neighbour(pid=2, held_bytes=1 * GIB))))
    assert device.neighbours is None
    assert device.unknowns == ("neighbours",)


def test_neighbours_whose_memory_the_driver_hides_are_named_and_said_to_be_unknown() -> None:
    device = detected(FakeGpu(held=(Neighbour(pid=OWN, held_bytes=None), Neighbour(pid=9, held_bytes=None))))
    assert device.neighbours == (Neighbour(pid=9, held_bytes=None),)
    assert "neighbours" in device.unknowns
    assert device.context_high_bytes == 1450 * MIB


def test_torchs_own_limit_bounds_the_capacity() -> None:
    device = detected(FakeGpu(fraction=0.25))
    assert device.memory_fraction == 0.25
    # a quarter of 42298834944, which is of torch's bytes, and the context beside them
    assert device.capacity_bytes == 10574708736 + (device.process_bytes - 2 * GIB)


def test_a_whole_share_is_no_limit() -> None:
    assert detected(FakeGpu(fraction=1.0)).memory_fraction is None
    assert detected(FakeGpu(fraction=None)).memory_fraction is None


def test_a_mig_instance_has_its_own_memory_and_no_rates() -> None:
    """Reported in Lightning-AI/pytorch-lightning#10529, pytorch/pytorch#92315: a slice is taken for the whole."""
    facts = dataclasses.replace(A100, name="NVIDIA A100-SXM4-40GB MIG 1g.10gb", total_bytes=9856 * MIB, uuid="mmmm")
    device = detected(FakeGpu(facts=facts, free=8 * GIB, reserved=0, held=None))
    assert device.mig_profile == "1g.10gb"
    assert device.key == "a100-40gb"
    assert device.total_bytes == 9856 * MIB
    assert device.peak_flops == {} and device.bandwidth_bytes_per_second is None
    assert "rates" in device.unknowns


def test_devices_are_matched_by_identifier_where_torch_and_nvml_count_differently() -> None:
    # CUDA_VISIBLE_DEVICES=1,0: torch's first is the driver's second
    first = FakeGpu(facts=dataclasses.replace(A100, uuid="bbbb"), held=(Neighbour(pid=OWN, held_bytes=3 * GIB),))
    second = FakeGpu(held=(Neighbour(pid=OWN, held_bytes=2 * GIB), Neighbour(pid=9, held_bytes=4 * GIB)))
    driver = FakeDriver([first, second], current=1)
    zero = detect_gpu(0, driver=driver, host=HOST)
    assert (zero.uuid, zero.neighbours) == ("bbbb", ())
    current = detect_gpu(None, driver=driver, host=HOST)
    assert (current.uuid, current.neighbours) == ("aaaa", (Neighbour(pid=9, held_bytes=4 * GIB),))


def test_a_driver_that_names_no_identifier_tells_no_neighbours() -> None:
    device = detected(FakeGpu(facts=dataclasses.replace(A100, uuid=None)))
    assert device.neighbours is None


def test_allocator_settings_and_spilling_are_told() -> None:
    """Reported in microsoft/WSL#11050: such a driver moves memory to the host without a word."""
    device = detected(FakeGpu(spilling=True), settings="expandable_segments:True")
    assert device.allocator_settings == "expandable_segments:True"
    assert device.spills


def test_shared_memory_is_bounded_by_the_total_and_by_what_the_host_has() -> None:
    """Reported in unslothai/unsloth#7960: 120 GiB free of a total of 62.47 GiB."""
    facts = dataclasses.replace(A100, name="NVIDIA GB10", total_bytes=62 * GIB, is_integrated=True)
    device = detected(FakeGpu(facts=facts, free=120 * GIB, reserved=0, held=None))
    assert device.unified_memory
    assert device.available_bytes == 7 * GIB
    wide = detect_gpu(
        None,
        driver=FakeDriver([FakeGpu(facts=facts, free=120 * GIB, reserved=0, held=None)]),
        host=dataclasses.replace(HOST, available_bytes=100 * GIB),
    )
    assert wide.available_bytes == 62 * GIB


@pytest.mark.parametrize(("capability", "has_bf16"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_bf16_is_a_matter_of_compute_capability(capability: tuple[int, int], has_bf16: bool) -> None:
    """Reported in MakazhanAlpamys/Soup#387 and pytorch/pytorch#124996: torch claims bf16 where it emulates it."""
    device = detected(FakeGpu(facts=dataclasses.replace(A100, compute_capability=capability)))
    assert ("bf16-mixed" in device.supported_precisions) == has_bf16


def test_an_unknown_gpu_works_from_what_the_driver_says() -> None:
    facts = dataclasses.replace(A100, name="NVIDIA Future 9000", total_bytes=64 * GIB, compute_capability=(13, 0))
    device = detected(FakeGpu(facts=facts, held=None))
    assert device.key is None
    assert device.unknowns == ("rates", "context", "neighbours")
    assert (device.context_low_bytes, device.context_high_bytes) == (any_context_bytes().low, any_context_bytes().high)
    assert device.peak_flops == {}
    # torch's own bound is compute capability 12.1
    assert device.attention_backends == ("math",)


def test_another_board_of_the_same_name_is_not_taken_for_the_one_in_the_catalogue() -> None:
    facts = dataclasses.replace(A100, name="NVIDIA GeForce RTX 3060", total_bytes=6 * GIB, compute_capability=(8, 6))
    device = detected(FakeGpu(facts=facts, free=5 * GIB, reserved=0))
    assert device.key is None
    assert "rates" in device.unknowns


def test_an_amd_gpu_has_no_compute_capability_and_an_unknown_context() -> None:
    facts = GpuFacts(
        name="AMD Instinct MI300X",
        total_bytes=196592 * MIB,
        uuid="cccc",
        compute_capability=None,
        gfx="gfx942",
        is_integrated=False,
    )
    device = detected(FakeGpu(facts=facts, free=100 * GIB, reserved=1 * GIB, held=None))
    assert device.key == "mi300x"
    assert (device.capacity_bytes, device.process_bytes) == (101 * GIB, 1 * GIB)
    assert device.context_high_bytes is None
    assert device.unknowns == ("context", "neighbours")
    assert "bf16-mixed" in device.supported_precisions
    assert device.attention_backends == ("flash", "efficient", "math")


def test_memory_that_shrinks_is_seen_when_the_device_is_detected_again(tmp_path: Path) -> None:
    gpu = FakeGpu()
    driver = FakeDriver([FakeGpu(facts=dataclasses.replace(A100, uuid="bbbb")), gpu])
    before = detect_device("cuda:1", root=tmp_path, driver=driver)
    assert before.capacity_bytes == 32 * GIB + 500 * MIB
    gpu.free -= 10 * GIB
    gpu.held = (Neighbour(pid=OWN, held_bytes=2 * GIB + 500 * MIB), Neighbour(pid=9, held_bytes=10 * GIB))
    after = detect_again(before, root=tmp_path, driver=driver)
    assert after.capacity_bytes == 22 * GIB + 500 * MIB
    assert after.neighbours == (Neighbour(pid=9, held_bytes=10 * GIB),)


def test_a_gpu_that_is_gone_is_an_error(tmp_path: Path) -> None:
    driver = FakeDriver([FakeGpu()])
    before = detect_device("cuda", root=tmp_path, driver=driver)
    driver.gpus[0].facts = dataclasses.replace(A100, uuid="bbbb")
    with pytest.raises(ConfigurationError) as caught:
        detect_again(before, root=tmp_path, driver=driver)
    assert str(caught.value) == (
        "The GPU aaaa is not among the 1 that this process can use. Look at CUDA_VISIBLE_DEVICES and at nvidia-smi -L."
    )


def test_a_gpu_of_the_catalogue_stays_what_it_was() -> None:
    device = detect_device("t4", driver=FakeDriver([]))
    assert detect_again(device, driver=FakeDriver([])) is device


def test_local_is_the_current_gpu_where_there_is_one_and_cpu_is_always_the_host(tmp_path: Path) -> None:
    driver = FakeDriver([FakeGpu(), FakeGpu(facts=dataclasses.replace(A100, uuid="bbbb"))], current=1)
    assert detect_device("local", root=tmp_path, driver=driver).uuid == "bbbb"
    assert detect_device("cpu", root=tmp_path, driver=driver).kind == "cpu"
    assert detect_device("local", root=tmp_path, driver=FakeDriver([])).kind == "cpu"
    assert detect_again(detect_device("cpu", root=tmp_path), root=tmp_path).kind == "cpu"


def test_a_gpu_asked_for_where_there_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        detect_device("cuda:0", driver=FakeDriver([]))
    assert str(caught.value) == (
        "device='cuda:0' is not there: torch finds no GPU that this process can use. Use 'cpu', or a GPU of the "
        "catalogue, such as 'a100-40gb', to plan for another machine."
    )


@pytest.mark.parametrize(("count", "usable"), [(1, "'cuda:0'"), (2, "'cuda:0' to 'cuda:1'")])
def test_a_gpu_beyond_the_last_is_refused(count: int, usable: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect_device("cuda:7", driver=FakeDriver([FakeGpu()] * count))
    assert str(caught.value) == (
        f"device='cuda:7' does not exist: this process can use {count} GPU(s). Use {usable}, or change "
        "CUDA_VISIBLE_DEVICES."
    )


def test_a_gpu_of_the_catalogue_has_the_allocator_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert detect_device("t4").allocator_settings is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert detect_device("t4").allocator_settings == "expandable_segments:True"


def test_a_device_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="device=0 must be text: 'local', 'cpu', 'cuda:0', or a GPU of"):
        detect_device(0)  # type: ignore[arg-type]
