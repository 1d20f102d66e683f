"""The RAM that a process may use, read from planted file systems with control groups of both versions."""

from pathlib import Path

import pytest

from baton_engine.host_memory import HostMemory

MIB = 1 << 20
UNLIMITED = 0x7FFFFFFFFFFFF000
V1 = "/sys/fs/cgroup/memory"
V2 = "/sys/fs/cgroup"
NAMES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


class Machine:
    """A file system with 8 GiB of memory, of which 6 GiB are available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mounts = ["22 27 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw", "what is this"]
        self.write("/proc/meminfo", "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
        self.write("/proc/self/status", "Name:\tpython\nVmRSS:\t  512 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def member_of(self, *lines: str) -> None:
        self.write("/proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mount(self, version: int, point: str, top: str = "/", controller: str = "memory") -> None:
        kind, options = ("cgroup", f"rw,{controller}") if version == 1 else ("cgroup2", "rw,nsdelegate")
        self._mounts.append(f"3 2 0:2{version} {top} {point} rw,relatime shared:9 - {kind} cgroup {options}")
        self.write("/proc/self/mountinfo", "\n".join(self._mounts) + "\n")
        (self.root / point.lstrip("/").replace("\\040", " ")).mkdir(parents=True, exist_ok=True)

    def group(self, version: int, folder: str, limit: object, used: int = 0, stat: str = "") -> None:
        """Plant the files of a group; limit and used in bytes."""
        limit_file, used_file = NAMES[version]
        self.write(f"{folder}/{limit_file}", f"{limit}\n")
        self.write(f"{folder}/{used_file}", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"cache 1\n{stat}\n")

    def memory(self) -> tuple[int, int]:
        """Return (total, free) in MiB."""
        memory = HostMemory(self.root)
        return memory.total() // MIB, memory.free() // MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


ALL = (8192, 6144)


def test_without_control_groups(machine: Machine) -> None:
    assert machine.memory() == ALL
    assert HostMemory(machine.root).held() == 512 << 10
    machine.mount(2, V2)
    assert machine.memory() == ALL
    machine.member_of("0::/", "", "nonsense", "7:memory")
    assert machine.memory() == ALL


def test_version_2_in_a_container(machine: Machine) -> None:
    machine.mount(2, V2)
    machine.member_of("0::/")
    machine.group(2, V2, 1024 * MIB, 900 * MIB, f"anon 1\ninactive_file {300 * MIB}\nactive_file 5")
    assert machine.memory() == (1024, 424)
    machine.group(2, V2, "max", 900 * MIB)
    assert machine.memory() == ALL


def test_version_1_in_a_container_that_sees_only_its_group(machine: Machine) -> None:
    """Without a namespace the path is the host's, and the mount's root says which part of it is at the mount point."""
    pod = "/kubepods/burstable/pod1/abc"
    machine.mount(1, V1, top=pod)
    machine.member_of("11:cpu,cpuacct:/kubepods/x", f"4:memory:{pod}", f"1:name=systemd:{pod}")
    machine.group(1, V1, 1536 * MIB, 1000 * MIB, f"inactive_file 7\ntotal_inactive_file {100 * MIB}")
    assert machine.memory() == (1536, 636)


@pytest.mark.parametrize("path", ["/docker/of/the/host", "/../../outside", "/"])
def test_a_path_that_does_not_exist_below_the_mount(machine: Machine, path: str) -> None:
    """The group at the mount point is then the process's own."""
    for version, point in ((1, V1), (2, "/sys/fs/cgroup/unified")):
        machine.mount(version, point)
    machine.write("/sys/fs/outside/memory.limit_in_bytes", "1")
    machine.member_of(f"4:memory:{path}", "0::/elsewhere")
    machine.group(1, V1, 2048 * MIB, 2000 * MIB)
    assert machine.memory() == (2048, 48)


@pytest.mark.parametrize("pages", [4, 16, 64])
def test_version_1_without_a_limit(machine: Machine, pages: int) -> None:
    machine.mount(1, V1)
    machine.member_of("4:memory:/user.slice")
    unlimited = (1 << 63) // (pages << 10) * (pages << 10) - (pages << 10)
    assert pages != 4 or unlimited == UNLIMITED
    machine.group(1, f"{V1}/user.slice", unlimited, 5 * MIB, f"hierarchical_memory_limit {unlimited}")
    assert machine.memory() == ALL


@pytest.mark.parametrize(("version", "point"), [(1, V1), (2, V2)])
def test_the_lowest_limit_of_all_ancestors_counts(machine: Machine, version: int, point: str) -> None:
    machine.mount(version, point)
    machine.member_of("0::/pods/pod1/abc" if version == 2 else "4:memory:/pods/pod1/abc")
    machine.group(version, f"{point}/pods/pod1/abc", "max" if version == 2 else UNLIMITED, 100 * MIB)
    machine.group(version, f"{point}/pods/pod1", 1000 * MIB, 300 * MIB)
    machine.group(version, f"{point}/pods", 4000 * MIB, 3600 * MIB)
    machine.group(version, f"{point}/pods/other", 1 * MIB, 1 * MIB)
    # The pod has a limit, but its neighbours hold so much memory that less than the limit is free.
    assert machine.memory() == (1000, 400)


def test_version_1_tells_the_limit_of_an_ancestor_outside_of_the_container(machine: Machine) -> None:
    machine.mount(1, V1, top="/kubepods/pod1/abc")
    machine.member_of("4:memory:/kubepods/pod1/abc")
    machine.group(1, V1, UNLIMITED, 500 * MIB, f"hierarchical_memory_limit {1200 * MIB}")
    assert machine.memory() == (1200, 700)


@pytest.mark.parametrize("order", [1, -1])
def test_a_hybrid_of_both_versions(machine: Machine, order: int) -> None:
    """The controller is on one hierarchy only; the other has no file of it."""
    machine.mount(1, "/sys/fs/cgroup/cpu", controller="cpu")
    for version, point in [(1, V1), (2, "/sys/fs/cgroup/unified")][::order]:
        machine.mount(version, point)
    machine.member_of(*["5:cpu:/x", "4:memory:/jobs/7", "0::/jobs/7"][::order])
    machine.group(1, f"{V1}/jobs/7", 700 * MIB, 200 * MIB)
    machine.write("/sys/fs/cgroup/unified/jobs/7/cgroup.procs", "1\n")
    machine.write("/sys/fs/cgroup/cpu/x/memory.limit_in_bytes", "1")
    assert machine.memory() == (700, 500)


def test_of_several_mounts_the_one_that_holds_the_group(machine: Machine) -> None:
    """A pod may mount the groups of other pods, as monitoring agents do."""
    machine.mount(1, "/host/other", top="/kubepods/other")
    machine.mount(1, "/sys/fs/my\\040groups", top="/kubepods/mine")
    machine.member_of("4:memory:/kubepods/mine/a:b")
    machine.group(1, "/host/other", MIB, MIB)
    machine.group(1, "/sys/fs/my groups/a:b", 600 * MIB, 100 * MIB)
    assert machine.memory() == (600, 500)


def test_a_group_over_its_limit_has_nothing_free(machine: Machine) -> None:
    machine.mount(2, V2)
    machine.member_of("0::/")
    machine.group(2, V2, 100 * MIB, 120 * MIB)
    assert machine.memory() == (100, 0)


def test_a_limit_beyond_the_machine(machine: Machine) -> None:
    machine.mount(2, V2)
    machine.member_of("0::/")
    machine.group(2, V2, 100_000 * MIB, 100 * MIB)
    assert machine.memory() == ALL


def test_ram_of_this_machine() -> None:
    memory = HostMemory()
    assert 0 < memory.free() <= memory.total()
    assert 0 < memory.held() <= memory.total()
