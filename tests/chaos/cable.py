"""A second network namespace, joined to the current one by a veth pair that can be taken down at either end."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Literal

from baton_cli import leash

Side = Literal["near", "far"]
NEAR_ADDRESS, FAR_ADDRESS = "10.123.0.1", "10.123.0.2"
_POLL_S = 0.01


class Cable:
    """Needs the right to administer the namespace at hand."""

    def __init__(self, holder: int) -> None:
        """holder: a process in the far namespace, which lives as long as that."""
        self.far_prefix = ("nsenter", f"--net=/proc/{holder}/ns/net")  # runs a command there
        self._prefixes = {"near": (), "far": self.far_prefix}

    @classmethod
    @contextlib.asynccontextmanager
    async def plugged(cls) -> AsyncIterator["Cable"]:
        """Make the far namespace and both ends."""
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid())),
            *("unshare", "--net", "sleep", "infinity"),
        )
        try:
            here = os.readlink("/proc/self/ns/net")
            async with asyncio.timeout(10):
                while os.readlink(f"/proc/{holder.pid}/ns/net") == here:
                    await asyncio.sleep(_POLL_S)
            cable = cls(holder.pid)
            cable._run("near", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(holder.pid))
            for side, address in (("near", NEAR_ADDRESS), ("far", FAR_ADDRESS)):
                cable._run(side, "address", "add", f"{address}/24", "dev", side)
                for link in ("lo", side):
                    cable._run(side, "link", "set", link, "up")
            yield cable
        finally:
            holder.kill()
            await holder.wait()

    def cut(self, side: Side) -> None:
        """Take one end down: nothing passes, and nobody hears of it but by silence."""
        self._run(side, "link", "set", side, "down")

    def mend(self, side: Side) -> None:
        self._run(side, "link", "set", side, "up")

    def _run(self, side: str, *args: str) -> None:
        subprocess.run([*self._prefixes[side], "ip", *args], check=True)
