"""Whether files have been replaced."""

from pathlib import Path

FileState = tuple[tuple[int, int], ...]


def file_state(*paths: Path) -> FileState:
    """Return what is another once one of the files is another. Raises OSError."""
    stats = [path.stat() for path in paths]
    return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)
