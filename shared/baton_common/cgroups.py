"""The control groups that bound this process, of version 1, version 2 or both (Linux, cgroups(7))."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec


class Group(msgspec.Struct, frozen=True):
    """The folder of a group's files, whose names depend on the version of the hierarchy."""

    version: int
    folder: Path


class _Mount(msgspec.Struct, frozen=True):
    """Where a hierarchy is mounted. top: the path, within the hierarchy, of the group at the mount point."""

    top: PurePosixPath
    point: Path


def groups_of(controller: str, root: Path = Path("/")) -> list[Group]:
    """Return this process's group and all visible ancestors, for each hierarchy that may have the controller.

    Groups come innermost first. Version 2 mounts all controllers together, so its groups are returned even where the
    controller is on a version 1 hierarchy; they then lack its files. root: replaces `/` in tests.
    """
    groups = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        version = 2 if number == "0" and not controllers else 1
        if version == 2 or controller in controllers.split(","):
            mounts = list(_mounts(version, controller, root))
            groups += [Group(version, folder) for folder in _folders(mounts, PurePosixPath(path))]
    return groups


def _mounts(version: int, controller: str, root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, system = line.partition(" - ")
        fields, kind = place.split(), system.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        of_version = kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and controller in kind[2].split(",")
        if of_version:
            yield _Mount(PurePosixPath(_unescaped(fields[3])), root / _unescaped(fields[4]).lstrip("/"))


def _folders(mounts: list[_Mount], path: PurePosixPath) -> list[Path]:
    """Return the folder of a group and its ancestors up to the mount point.

    In a container, the path is often the one on the host, or ".." parts lead out of its namespace, while its own group
    is at the mount point. The function then returns the mount point.
    """
    for mount in mounts:
        if path.is_relative_to(mount.top) and ".." not in path.parts:
            inside = path.relative_to(mount.top)
            if (mount.point / inside).is_dir():
                return [mount.point / part for part in (inside, *inside.parents)]
    return [mount.point for mount in mounts[:1]]


def _unescaped(text: str) -> str:
    """Return text without the octal escapes that mountinfo writes for spaces and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []
