"""The CPU cores that this process may use."""

import math
import os
from pathlib import Path

from .cgroups import groups_of


def available_cores() -> float:
    """Return how many cores this process may keep busy: the cores of its affinity, within its cgroup's CPU quota."""
    return min(len(os.sched_getaffinity(0)), cpu_quota() or math.inf)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process's cgroup in cores, often not a whole number; None: no quota can be read.

    The limit of a cgroup also holds for the cgroups below it, so the lowest limit on the way to the root counts. The
    kernel's documentation: "Control Group v2" (cpu.max) and "CFS Bandwidth Control" (cpu.cfs_quota_us of version 1).
    root: replaces `/` in tests.
    """
    limits = [limit for group in groups_of("cpu", root) if (limit := _limit(group.folder)) is not None]
    return min(limits, default=None)


def _limit(folder: Path) -> float | None:
    """Return the limit of one cgroup, in cores."""
    both = _read(folder / "cpu.max").split()
    if not both:
        both = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    try:
        quota, period = map(int, both)
        return quota / period if quota > 0 and period > 0 else None
    except (ValueError, OverflowError):  # cpu.max reads "max" when there is no limit; malformed text counts the same
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
