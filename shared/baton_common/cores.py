"""The CPU cores that this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> float:
    """Return how many cores this process may keep busy: those of its affinity, within the CPU quota of its cgroup."""
    return min(len(os.sched_getaffinity(0)), cpu_quota() or math.inf)


def cpu_quota(proc: Path = _PROC, cgroup: Path = _CGROUP) -> float | None:
    """Return the CPU quota of this process's cgroup in cores, often not a whole number; None: no quota can be read.

    The limit of a cgroup also holds for the cgroups below it, so that the lowest on the way to the root counts. The
    kernel's documentation: "Control Group v2" (cpu.max) and "CFS Bandwidth Control" (cpu.cfs_quota_us of version 1).
    proc, cgroup: where these file systems are mounted.
    """
    limits = [limit for folder in _cgroup_folders(proc, cgroup) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _cgroup_folders(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups that may limit its CPU, and those of the cgroups above them.

    A container may see its own cgroup as the mounted root, though /proc names the path on the host: then only the root
    is there.
    """
    for line in _read(proc / "self" / "cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            mounts = [cgroup]
        elif "cpu" in controllers.split(","):
            mounts = [cgroup / controllers, cgroup / "cpu"]
        else:
            continue
        parts = PurePosixPath(path.lstrip("/")).parts
        # A process that was moved out of its namespace's root has a path with "..", which leads to no folder here.
        depths = [0] if ".." in parts else range(len(parts), -1, -1)
        for mount in mounts:
            yield from (mount.joinpath(*parts[:depth]) for depth in depths)


def _limit(folder: Path) -> float | None:
    """Return the limit of one cgroup, in cores."""
    both = _read(folder / "cpu.max").split()
    if not both:
        both = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    try:
        quota, period = map(int, both)
        return quota / period if quota > 0 and period > 0 else None
    except (ValueError, OverflowError):  # "max", or not what the kernel writes
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
