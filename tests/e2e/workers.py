"""Real prefill and decode workers, started one by one."""

import signal
from pathlib import Path
from typing import Any, Literal

from baton_common.peer_token import PeerToken
from tests.peer_files import PeerFiles

from .pod import Pod
from .process import Process

Role = Literal["prefill", "decode"]


class Worker(Pod):
    """A worker pod that the test has started."""

    def __init__(self, process: Process, port: int, peers: PeerFiles | None) -> None:
        super().__init__(f"127.0.0.1:{port}", peers)
        self.process = process

    @classmethod
    async def start(
        cls,
        role: Role,
        model: Path,
        env: dict[str, str] | None = None,
        peers: PeerFiles | None = None,
        **flags: Any,
    ) -> "Worker":
        """Start a worker on any free port and wait until it serves. flags: its settings by field name."""
        settings = {"model": model, "port": 0, "num_threads": 1, "num_blocks": 512, **flags}
        settings |= peers.settings if peers is not None else {}
        args = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        process = await Process.start(role, *args, env=env)
        try:
            worker = cls(process, (await process.logged("ready"))["port"], peers)
            worker.token = PeerToken(flags["peer_token_file"]) if "peer_token_file" in flags else None
            return worker
        except BaseException:
            await process.kill()
            raise

    def freeze(self) -> None:
        """Stop the pod's processes in the middle of whatever they do."""
        self.process.send_to_group(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_to_group(signal.SIGCONT)

    async def kill(self) -> None:
        await self.process.kill()
