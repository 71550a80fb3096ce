"""What `quire doctor` says is slow on a machine: each check on files that are made for it, and the command itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import Run
from command_line import run as run
from quire.cli.slow_machine import SLOW_READ, System, debug_build, others, slow_memory, slow_things
from quire.ops.native import load_native

FINE = {
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/fs/cgroup/cpu.max": "max 100000",
    "sys/devices/system/node/node0/cpulist": "0-1",
    "proc/meminfo": "MemTotal: 1000 kB\nSwapTotal: 2097152 kB\nSwapFree: 2097152 kB\nHugePages_Total: 0",
    "proc/mounts": "/dev/sda1 / ext4 rw 0 0\nserver:/x /mnt/far nfs4 rw 0 0",
    "proc/stat": "cpu  100 0 100 8000 0 0 0 0 0 0\ncpu0 50 0 50 4000 0 0 0 0\ncpu1 50 0 50 4000 0 0 0 0",
    "proc/cpuinfo": "model name : any\nflags : fpu fma avx2 sse2",
}
CPU = "sys/devices/system/cpu/cpu{}/{}"


class Made(System):
    """A system of files below a folder, of whose processors' times the second look finds `later`."""

    def __init__(self, root: Path, files: dict[str, str], later: str = "") -> None:
        super().__init__(root, self.wait)
        self.later = later
        for name, text in (FINE | files).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def wait(self, seconds: float) -> None:
        """Let the time pass."""
        if self.later:
            (self.root / "proc/stat").write_text(self.later)


def found(system: System, built: tuple[str, ...] = ("avx2", "portable"), torch: bool = True) -> dict[str, str]:
    """Checks that found something, with what they say."""
    packages = {"torch": torch, "triton": torch}
    return {each.check: each.text for each in slow_things(system, packages, built, Path("/home"))}


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.core.machine.cpu_set", lambda: frozenset({0, 1}))


def test_a_machine_without_faults_has_none(tmp_path: Path) -> None:
    assert found(Made(tmp_path, {})) == {}
    assert found(System(tmp_path / "nowhere", lambda seconds: None)) == {}, "a system that tells nothing (macOS)"


CASES: dict[str, tuple[dict[str, str], str]] = {
    "quota": ({"sys/fs/cgroup/cpu.max": "150000 100000"}, "a CPU quota of 1.5 of 2 cores"),
    "throttled": (
        {"sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 100\nnr_throttled 30\nthrottled_usec 9"},
        "in 30% of its periods",
    ),
    "hyper-threads": (
        {CPU.format(i, "topology/thread_siblings_list"): "0-1" for i in (0, 1)},
        "2 CPUs are hyper-threads of 1 cores",
    ),
    "numa": ({"sys/devices/system/node/node1/cpulist": "2-3"}, "2 NUMA nodes"),
    "governor": (
        {CPU.format(0, f"cpufreq/scaling_{name}"): text for name, text in
         (("governor", "powersave"), ("driver", "acpi-cpufreq"))},
        "1 of 1 CPUs are kept at low clocks",
    ),
    "huge-pages": ({"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, "pages of 4 KiB"),
    "swap": ({"proc/meminfo": "SwapTotal: 2097152 kB\nSwapFree: 1048576 kB"}, "1.0 GiB of swap are in use"),
    "disk": ({"proc/mounts": "/dev/sda1 / ext4 rw 0 0\nserver:/x /home nfs4 rw 0 0"}, "network file system (nfs4)"),
    "kernels": ({"proc/cpuinfo": "flags : avx2 fma avx512bw avx512_vnni"}, "the processor has avx512vnni"),
}  # fmt: skip


@pytest.mark.parametrize("check", CASES)
def test_each_check_sees_what_it_is_for_and_nothing_else(check: str, tmp_path: Path) -> None:
    files, text = CASES[check]
    told = found(Made(tmp_path, files))
    assert list(told) == [check] and text in told[check], told


def test_powersave_of_drivers_that_follow_the_load_is_no_fault(tmp_path: Path) -> None:
    files = {CPU.format(0, "cpufreq/scaling_governor"): "powersave",
             CPU.format(0, "cpufreq/scaling_driver"): "intel_pstate"}  # fmt: skip
    assert found(Made(tmp_path, files)) == {}
    saving = CPU.format(0, "cpufreq/energy_performance_preference")
    assert list(found(Made(tmp_path, files | {saving: "power"}))) == ["governor"]


def test_processes_and_machines_beside_are_seen(tmp_path: Path) -> None:
    later = "cpu  160 0 100 8030 0 0 0 10 0 0\ncpu0 1\ncpu1 1"
    told = [each.text for each in others(Made(tmp_path, {}, later))]
    assert told == ["other processes take 1.2 of 2 CPUs now",
                    "the host gives 10% of this virtual machine's CPU time to others"]  # fmt: skip


def test_missing_kernels_and_packages_are_named(tmp_path: Path) -> None:
    assert "slow reference" in found(Made(tmp_path, {}), built=())["kernels"]
    told = found(Made(tmp_path, {"dev/nvidia0": ""}), torch=False)
    assert told == {"gpu": "there is a GPU, and PyTorch is missing, so that it is not used"}
    assert debug_build(True) is not None and debug_build(False) is None


def test_memory_is_slow_for_its_cores_only_below_the_bound() -> None:
    assert slow_memory(2 * SLOW_READ, 2) is None
    told = slow_memory(5e9, 8)
    assert told is not None and "5.0 GB/s, less than 24 GB/s that 8 cores could use" in told.text


@pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
def test_the_command_says_it_in_words_and_as_json(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["would run"]["backend"] and isinstance(facts["slow here"], list)
    assert all(set(each) == {"check", "level", "text", "advice"} for each in facts["slow here"])
    assert "tokens/s of one sequence" in facts["can reach at most"]["SmolLM2-135M Q4_1"]
    code, out, _ = run("doctor", "--device", "reference")
    assert code == 0 and "slow here" in out
