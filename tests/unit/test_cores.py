"""How many cores a process may use, from cgroup files of all kinds."""

import os
from pathlib import Path

import pytest

from baton_common import cores
from baton_common.cores import available_cores, cpu_quota

POD = "kubepods/burstable/pod1"


MOUNTS = """\
30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/cpuset rw,nosuid - cgroup cgroup rw,cpuset
"""


class Machine:
    """The files of a machine, as far as they matter here."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.write("proc/self/mountinfo", MOUNTS)

    def write(self, path: str, text: str) -> "Machine":
        """path: below the root, where `cgroup/` stands for the mount point of cgroups."""
        file = self._root / path.replace("cgroup/", "sys/fs/cgroup/", path.startswith("cgroup/"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("latin-1"))
        return self

    def quota(self) -> float | None:
        return cpu_quota(self._root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def version_1(machine: Machine, quota: str, folder: str = "cpu,cpuacct") -> Machine:
    machine.write("proc/self/mountinfo", MOUNTS.replace("cgroup/cpu,cpuacct", f"cgroup/{folder}"))
    machine.write("proc/self/cgroup", "11:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/system.slice\n")
    machine.write(f"cgroup/{folder}/cpu.cfs_quota_us", f"{quota}\n")
    return machine.write(f"cgroup/{folder}/cpu.cfs_period_us", "100000\n")


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000\n", 2), ("150000 100000\n", 1.5), ("25000 50000\n", 0.5), ("max 100000\n", None)],
)
def test_version_2(machine: Machine, text: str, cores: float | None) -> None:
    machine.write("proc/self/cgroup", "0::/\n").write("cgroup/cpu.max", text)
    assert machine.quota() == cores


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "cores"), [("400000", 4), ("130000", 1.3), ("50000", 0.5), ("-1", None)])
def test_version_1(machine: Machine, folder: str, quota: str, cores: float | None) -> None:
    assert version_1(machine, quota, folder=folder).quota() == cores


def test_the_process_is_in_a_cgroup_below_the_mounted_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", f"0::/{POD}\n").write(f"cgroup/{POD}/cpu.max", "300000 100000\n")
    assert machine.quota() == 3


def test_the_lowest_limit_on_the_way_to_the_root_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", f"0::/{POD}/one\n")
    machine.write(f"cgroup/{POD}/one/cpu.max", "500000 100000\n").write(f"cgroup/{POD}/cpu.max", "120000 100000\n")
    machine.write("cgroup/kubepods/cpu.max", "6400000 100000\n")
    assert machine.quota() == 1.2


def test_version_1_below_the_mounted_root(machine: Machine) -> None:
    version_1(machine, "-1").write("cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us", "70000")
    assert machine.write("cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us", "100000").quota() == 0.7


def test_other_hierarchies_say_nothing(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "2:cpuset:/a\n3:cpuacct:/a\n")
    machine.write("cgroup/cpuset/cpu.max", "1000 100000").write("cgroup/cpuacct/a/cpu.max", "1000 100000")
    assert machine.quota() is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", "max", "100000", "two 100000", "-5 100000", "0 100000", "100000 0", "100000 -1", "1 2 3"),
        *("nan 100000", "inf 100000", "1e5 100000", "9" * 400 + " 1", "9" * 9_000 + " 1", "\xff\xfe\x00 \x00"),
    ],
)
def test_nonsense_is_no_quota(machine: Machine, text: str) -> None:
    machine.write("proc/self/cgroup", "0::/\n").write("cgroup/cpu.max", text)
    assert machine.quota() is None


@pytest.mark.parametrize("text", ["", "0", "0::", "::", "no cgroup\n", "0::/../..\n", "0::/a\x00b\n", "\xff:\xff:\xff"])
def test_nonsense_about_the_own_cgroup(machine: Machine, text: str) -> None:
    # A limit that lies beside the mounted cgroups is not of this process.
    assert machine.write("proc/self/cgroup", text).write("cpu.max", "1000 100000").quota() is None


def test_absent_files(machine: Machine) -> None:
    assert machine.quota() is None
    assert machine.write("proc/self/cgroup", "0::/\n4:cpu:/\n").quota() is None


@pytest.mark.parametrize(("quota", "cores_"), [(None, 4), (1.5, 1.5), (64.0, 4), (0.25, 0.25)])
def test_affinity_and_quota_together(monkeypatch: pytest.MonkeyPatch, quota: float | None, cores_: float) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5, 7})
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert available_cores() == cores_
