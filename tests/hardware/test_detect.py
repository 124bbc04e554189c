"""Detection against a fake tree of /proc and /sys/fs/cgroup, and once against the machine that runs the tests."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.units import GIB, MIB

V1_NO_LIMIT = "9223372036854771712\n"


class Machine:
    """A fake tree: 16 GiB, of which 12 GiB are available, and a process that holds 512 MiB."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal:       {16 * GIB // 1024} kB\n"
            f"MemFree:        {1 * GIB // 1024} kB\n"
            f"MemAvailable:   {12 * GIB // 1024} kB\n"
            "HugePages_Total:       0\n",
        )
        self.process(512 * MIB)
        self.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Example 9000 CPU @ 2.0GHz\nmodel\t\t: 2\n")

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def process(self, size: int) -> None:
        self.write("proc/self/status", f"Name:\tpython\nVmPeak:\t 9999999 kB\nVmRSS:\t {size // 1024} kB\n")

    def group_v2(self, path: str, *, limit: int | str, used: int, inactive_file: int = 0, active_file: int = 0) -> None:
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(
            f"{folder}/memory.stat", f"anon 1\nfile 2\ninactive_file {inactive_file}\nactive_file {active_file}\n"
        )

    def group_v1(self, path: str, *, limit: str, used: int, cache: int = 0, hierarchical: str = V1_NO_LIMIT) -> None:
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        # "inactive_file" is this group's own, "total_" that of the whole subtree, which the limit is about.
        stat = f"inactive_file 1\nhierarchical_memory_limit {hierarchical.strip()}\ntotal_inactive_file {cache}\n"
        self.write(f"{folder}/memory.stat", stat + "total_active_file 0\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_cgroup_the_system_decides(machine: Machine) -> None:
    """Reported in MIC-DKFZ/nnUNet#30, vllm-project/vllm#7256, hydra-ecosystem/hydra#3458."""
    device = detect_device(root=machine.root)
    assert device.name == "Example 9000 CPU @ 2.0GHz"
    assert device.kind == "cpu"
    assert device.available_bytes == 12 * GIB
    assert device.process_bytes == 512 * MIB
    assert device.capacity_bytes == 12 * GIB + 512 * MIB
    assert device.limit_bytes is None
    assert device.limit_source is None
    assert device.supported_precisions == ("32-true", "bf16-mixed")


@pytest.mark.parametrize("which", ["local", "cpu"])
def test_local_and_cpu_are_the_host(machine: Machine, which: str) -> None:
    assert detect_device(which, root=machine.root).kind == "cpu"


def test_a_name_that_fits_several_gpus_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect_device("H100")
    assert str(caught.value) == (
        "device='H100' could mean 3 GPUs of the catalogue. Use one of 'h100-pcie', 'h100-sxm', 'h100-nvl'. "
        "For this machine use 'local', 'cpu' or 'cuda:0'."
    )


def test_a_gpu_of_the_catalogue_is_described_without_one() -> None:
    device = detect_device("a100-40gb")
    assert (device.key, device.is_present) == ("a100-40gb", False)


def test_the_v2_limit_of_the_own_group_is_found(machine: Machine) -> None:
    """Reported in brain-score/vision#2471, Comfy-Org/ComfyUI#14938, kekzl/imp#2070, soda-inria/tabicl#145."""
    machine.write("proc/self/cgroup", "0::/user.slice/job\n")
    machine.group_v2("user.slice/job", limit=4 * GIB, used=1 * GIB)
    device = detect_device(root=machine.root)
    assert device.limit_bytes == 4 * GIB
    assert device.limit_source == "memory.max"
    assert device.available_bytes == 3 * GIB  # 4 - 1
    assert device.capacity_bytes == 3 * GIB + 512 * MIB


def test_a_v2_limit_in_a_parent_applies(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/batch/job/step\n")
    machine.group_v2("batch/job/step", limit="max", used=600 * MIB)
    machine.group_v2("batch/job", limit=2 * GIB, used=1 * GIB)
    machine.group_v2("batch", limit="max", used=5 * GIB)
    device = detect_device(root=machine.root)
    assert device.limit_bytes == 2 * GIB
    assert device.available_bytes == 1 * GIB


def test_of_nested_v2_limits_the_one_that_leaves_least_wins(machine: Machine) -> None:
    # The parent's limit is larger, but a neighbour has used it up.
    machine.write("proc/self/cgroup", "0::/batch/job\n")
    machine.group_v2("batch/job", limit=4 * GIB, used=1 * GIB)
    machine.group_v2("batch", limit=8 * GIB, used=7 * GIB)
    device = detect_device(root=machine.root)
    assert device.limit_bytes == 8 * GIB
    assert device.available_bytes == 1 * GIB


def test_max_is_no_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.group_v2("job", limit="max", used=1 * GIB)
    device = detect_device(root=machine.root)
    assert device.limit_bytes is None
    assert device.available_bytes == 12 * GIB


def test_a_limit_above_the_system_memory_does_not_raise_what_is_available(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.group_v2("job", limit=64 * GIB, used=1 * GIB)
    assert detect_device(root=machine.root).available_bytes == 12 * GIB


def test_v2_page_cache_is_not_counted_as_used(machine: Machine) -> None:
    """Reported in brain-score/vision#2471, Comfy-Org/ComfyUI#14938, kekzl/imp#2070, soda-inria/tabicl#145."""
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.group_v2("job", limit=4 * GIB, used=3 * GIB, inactive_file=1 * GIB, active_file=512 * MIB)
    # 4 - (3 - 1 - 0.5) = 2.5 GiB
    assert detect_device(root=machine.root).available_bytes == 2 * GIB + 512 * MIB


def test_mapped_libraries_do_not_lift_the_capacity_above_the_limit(machine: Machine) -> None:
    # RSS 512 MiB, of which 400 MiB are mapped files: the group counts these as page cache.
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.group_v2("job", limit=1 * GIB, used=512 * MIB, active_file=400 * MIB)
    device = detect_device(root=machine.root)
    assert device.available_bytes == 512 * MIB
    assert device.capacity_bytes == 1 * GIB


def test_capacity_stays_within_the_memory_of_the_machine(machine: Machine) -> None:
    machine.process(5 * GIB)  # 12 available + 5 held would be more than the 16 there are
    assert detect_device(root=machine.root).capacity_bytes == 16 * GIB


def test_a_group_over_its_limit_leaves_nothing_rather_than_a_negative_number(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.group_v2("job", limit=256 * MIB, used=600 * MIB)
    device = detect_device(root=machine.root)
    assert device.available_bytes == 0
    assert device.capacity_bytes == 512 * MIB


def test_a_container_whose_cgroup_path_is_not_visible_reads_the_mount_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/kubepods/pod-1/container-2\n")
    machine.group_v2("", limit=2 * GIB, used=1 * GIB)
    device = detect_device(root=machine.root)
    assert device.limit_bytes == 2 * GIB
    assert device.available_bytes == 1 * GIB


def test_a_cgroup_path_outside_the_namespace_never_leaves_the_mount(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/../../sibling\n")
    machine.group_v2("", limit=2 * GIB, used=1 * GIB)
    machine.write("sys/sibling/memory.max", f"{600 * MIB}\n")
    assert detect_device(root=machine.root).limit_bytes == 2 * GIB


def test_the_v1_memory_controller_is_read(machine: Machine) -> None:
    """Reported in brain-score/vision#2471, Comfy-Org/ComfyUI#14938, kekzl/imp#2070, soda-inria/tabicl#145."""
    machine.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,cpuacct:/other\n3:memory:/slurm/job_7\n0::/\n")
    machine.group_v1("slurm/job_7", limit=f"{4 * GIB}\n", used=2 * GIB, cache=1 * GIB)
    device = detect_device(root=machine.root)
    assert device.limit_bytes == 4 * GIB
    assert device.limit_source == "memory.limit_in_bytes"
    assert device.available_bytes == 3 * GIB  # 4 - (2 - 1)


def test_a_v1_limit_in_a_parent_applies(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "3:memory:/slurm/job_7\n")
    machine.group_v1("slurm/job_7", limit=V1_NO_LIMIT, used=1 * GIB)
    machine.group_v1("slurm", limit=f"{3 * GIB}\n", used=2 * GIB)
    device = detect_device(root=machine.root)
    assert device.limit_bytes == 3 * GIB
    assert device.available_bytes == 1 * GIB


def test_the_huge_v1_number_means_no_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "3:memory:/job\n")
    machine.group_v1("job", limit=V1_NO_LIMIT, used=1 * GIB)
    device = detect_device(root=machine.root)
    assert device.limit_bytes is None
    assert device.available_bytes == 12 * GIB


def test_the_v1_hierarchical_limit_tells_of_parents_that_a_container_cannot_see(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "3:memory:/docker/abc\n")
    machine.group_v1("", limit=V1_NO_LIMIT, used=1 * GIB, hierarchical=str(2 * GIB))
    device = detect_device(root=machine.root)
    assert device.limit_bytes == 2 * GIB
    assert device.limit_source == "memory.stat hierarchical_memory_limit"
    assert device.available_bytes == 1 * GIB


def test_beside_v1_the_second_version_is_read_at_its_own_mount(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "3:memory:/\n0::/job\n")
    machine.group_v1("", limit=V1_NO_LIMIT, used=1 * GIB)
    machine.group_v2("unified/job", limit=3 * GIB, used=1 * GIB)
    assert detect_device(root=machine.root).limit_bytes == 3 * GIB


def test_a_limit_without_a_usage_file_counts_what_the_process_holds(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/fs/cgroup/job/memory.max", f"{2 * GIB}\n")
    assert detect_device(root=machine.root).available_bytes == 2 * GIB - 512 * MIB


def test_cores_are_those_the_process_may_run_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert detect_device(root=machine.root).cores == 3


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8)]
)
def test_a_cpu_quota_lowers_the_cores(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/fs/cgroup/job/cpu.max", f"{quota}\n")
    assert detect_device(root=machine.root).cores == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [(-1, 100_000, 8), (250_000, 100_000, 3), (50_000, 100_000, 1), (9_900_000, 100_000, 8), (0, 0, 8)],
)
def test_a_v1_cpu_quota_lowers_the_cores(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: int, period: int, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    machine.write("proc/self/cgroup", "4:cpu,cpuacct:/job\n")
    machine.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", f"{quota}\n")
    machine.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", f"{period}\n")
    assert detect_device(root=machine.root).cores == cores


def test_without_a_model_name_the_platform_names_the_processor(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write("proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\n")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert detect_device(root=machine.root).name == "aarch64"
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert detect_device(root=machine.root).name == "arm"


def test_without_proc_psutil_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        virtual_memory=lambda: SimpleNamespace(total=8 * GIB, available=5 * GIB),
        Process=lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1 * GIB)),
    )
    monkeypatch.setitem(sys.modules, "psutil", fake)
    device = detect_device(root=tmp_path)
    assert (device.available_bytes, device.process_bytes, device.capacity_bytes) == (5 * GIB, 1 * GIB, 6 * GIB)


def test_this_machine_has_sane_numbers() -> None:
    psutil = pytest.importorskip("psutil", reason="psutil is the independent witness")
    device = detect_device()
    assert device.name.strip()
    assert 1 <= device.cores <= (os.cpu_count() or 1)
    # A Python process with torch in it holds more than 20 MiB and less than the machine.
    assert 20 * MIB < device.process_bytes < psutil.virtual_memory().total
    assert abs(device.process_bytes - psutil.Process().memory_info().rss) < 64 * MIB
    assert 0 <= device.available_bytes <= psutil.virtual_memory().total
    assert device.capacity_bytes == device.available_bytes + device.process_bytes
    assert device.capacity_bytes <= psutil.virtual_memory().total
    assert device.limit_bytes is None or device.capacity_bytes <= max(device.limit_bytes, device.process_bytes)


@pytest.mark.parametrize("spelled", ["CPU", " cpu "])
def test_this_machine_is_meant_in_any_spelling_as_the_catalogue_is(spelled: str) -> None:
    assert detect_device(spelled).kind == "cpu"
