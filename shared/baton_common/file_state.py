"""Detects that files have been replaced."""

from pathlib import Path

FileState = tuple[tuple[int, int], ...]


def file_state(*paths: Path) -> FileState:
    """Return a value that changes when one of the files is replaced or written. Raises OSError."""
    stats = [path.stat() for path in paths]
    return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)
