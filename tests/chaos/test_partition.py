"""A network partition between prefill and decode."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton_cli import leash

_LIMIT_S = 150
_ROOT = Path(__file__).parents[2]


@pytest.fixture
def namespace_prefix() -> list[str]:
    """Return what runs a command in a network namespace that it may administer, as root or as any user."""
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    attempt = ["ip", "link", "add", "near", "type", "veth", "peer", "name", "far"]
    reasons = []
    for flags in ([], ["--user", "--map-root-user"]):
        prefix = ["unshare", *flags, "--net"]
        tried = subprocess.run([*prefix, *attempt], capture_output=True, text=True)
        if tried.returncode == 0:
            return prefix
        reasons.append(f"{' '.join(prefix)}: {tried.stderr.strip()}")
    pytest.skip(f"no network namespace with a veth pair is permitted here: {'; '.join(reasons)}")


@pytest.mark.timeout(_LIMIT_S + 30)
async def test_prefill_and_decode_are_parted(
    llama: Path, tmp_path: Path, seed: int, namespace_prefix: list[str]
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *namespace_prefix),
        *(sys.executable, "-m", "tests.chaos.partition", str(llama), str(tmp_path), str(seed)),
        cwd=_ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    print(output.decode())
    assert process.returncode == 0
