"""Programs of Debian's packages, for tests that run them."""

import os
import shutil
import subprocess
from pathlib import Path

_SBIN = ":/usr/sbin"


class NoProgramError(Exception):
    """There is none; the message says why."""


def find_program(name: str, package: str, cache: Path, version_flag: str = "--version") -> Path:
    """Return a program: the installed one, or else that of Debian's package, unpacked into the cache folder.

    Raises NoProgramError.
    """
    if installed := shutil.which(name, path=os.environ["PATH"] + _SBIN):
        return Path(installed)
    try:
        unpacked = _unpacked(name, cache)
        if unpacked is None:
            _run("apt-get", "download", package, cwd=cache)
            [file] = cache.glob(f"{package}_*.deb")
            _run("dpkg", "-x", file.name, ".", cwd=cache)
            unpacked = _unpacked(name, cache)
            assert unpacked is not None
        _run(str(unpacked), version_flag, cwd=cache)
    except FileNotFoundError as error:
        raise NoProgramError(f"{name} is not installed, and there is no {error.filename} to get it with") from None
    except subprocess.CalledProcessError as error:
        raise NoProgramError(f"{name} is not installed, and `{error.cmd[0]}` failed: {error.stderr.strip()}") from None
    return unpacked


def _unpacked(name: str, cache: Path) -> Path | None:
    return next((path for folder in ("bin", "sbin") if (path := cache / "usr" / folder / name).exists()), None)


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=100)
