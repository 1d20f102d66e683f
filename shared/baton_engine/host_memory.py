"""The RAM of this process, within the limits of its container."""

from pathlib import Path
from typing import NamedTuple

from baton_common.cgroups import Group, groups_of


class HostMemory:
    """RAM, within the limits of the control groups around this process. root: of the file system; tests change it."""

    name = "cpu"
    measured = False

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._groups = [_GroupMemory(group) for group in groups_of("memory", root)]

    def total(self) -> int:
        limits = (group.limit() for group in self._groups)
        return min([self._info("MemTotal"), *(limit for limit in limits if limit is not None)])

    def free(self) -> int:
        rooms = (group.free() for group in self._groups)
        return max(min([self._info("MemAvailable"), *(room for room in rooms if room is not None)]), 0)

    def held(self) -> int:
        return _field(self._proc / "self" / "status", "VmRSS:") << 10

    def trim(self) -> None:
        pass

    def _info(self, name: str) -> int:
        return _field(self._proc / "meminfo", f"{name}:") << 10


class _GroupFiles(NamedTuple):
    """The file names of one version of control groups.

    inactive: the field of memory.stat that counts inactive pages of files, those of descendants included.
    """

    limit: str
    used: str
    inactive: str


_GROUP_FILES = {
    1: _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _GroupFiles("memory.max", "memory.current", "inactive_file"),
}
# Version 1 writes "no limit" as the largest number of whole pages, 0x7FFFFFFFFFFFF000 for pages of 4 KiB.
_NO_LIMIT = 1 << 62


class _GroupMemory:
    """The memory of one control group."""

    def __init__(self, group: Group) -> None:
        self._folder = group.folder
        self._files = _GROUP_FILES[group.version]

    def limit(self) -> int | None:
        """Return the lowest limit of this group and, in version 1, of ancestors that this process cannot see."""
        limits = (_number(self._folder / self._files.limit), _field(self._stat, "hierarchical_memory_limit"))
        return min((limit for limit in limits if limit and limit < _NO_LIMIT), default=None)

    def free(self) -> int | None:
        limit = self.limit()
        if limit is None:
            return None
        used = _number(self._folder / self._files.used) or 0
        # Inactive pages of files count as used, but the kernel frees them when processes need memory.
        return limit - used + _field(self._stat, self._files.inactive)

    @property
    def _stat(self) -> Path:
        return self._folder / "memory.stat"


def _number(path: Path) -> int | None:
    """Return the number that a file holds; None if the file is missing or holds "max"."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int:
    """Return the number after a name in a file with one pair per line; 0 if the file or the name is missing."""
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.split() for line in lines)
    return next((int(pair[1]) for pair in pairs if pair and pair[0] == name), 0)
