"""Runs an engine process for the RPC process: starts it, sends it commands and receives its outputs."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator

from baton_engine.config import ConfigError, EngineConfig
from baton_engine.threads import waiting_environment
from baton_kv.staging import StagingArena

from .channel import RpcEnd, channel_pair
from .messages import Command, Output, Ping, Progress, Ready, Refused, Start

log = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.25
_PINGS = 4
_END_S = 10.0


class EngineDied(RuntimeError):
    """The engine process ended by itself, so the pod must end too."""


# On CPU, oneDNN and torch's layer around it keep the kernels that they have made for matrix products of each size. A
# kernel takes up to 0.7 MB, so the default of 1,024 kernels may take as much memory as a small model. 256 kernels are
# enough for the sizes of fifty different steps.
_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}


class EngineClient:
    """One engine process. `exports` and `imports` are the staging arenas shared with it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: RpcEnd,
        ready: Ready,
        exports: StagingArena,
        imports: StagingArena,
    ) -> None:
        self.ready = ready
        self.exports = exports
        self.imports = imports
        self.import_slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(ready.num_slots):
            self.import_slots.put_nowait(slot)
        self._process = process
        self._channel = channel
        self._heard = True

    @classmethod
    async def start(
        cls, config: EngineConfig, service: str, log_level: str, gpu_pair_memory: float = 0.0
    ) -> "EngineClient":
        """Start the process and wait until its model is loaded. gpu_pair_memory: as in Start.

        Raises ConfigError when the settings or the model cannot be served, EngineDied when the process ends.
        """
        ours, theirs = channel_pair()
        fds = [StagingArena.create_file("baton-exports"), StagingArena.create_file("baton-imports")]
        # The ranks of an engine share the cores, too.
        sharing = config.engines_sharing_cpu if config.processes == 1 else None
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton_common.start", "baton_worker.engine_process", str(theirs.fileno())),
            env={**_KERNEL_CACHES, **os.environ, **waiting_environment(sharing, os.environ)},
            pass_fds=(theirs.fileno(), *fds),
        )
        theirs.close()
        channel = await RpcEnd.open(ours)
        try:
            channel.send(Start(config, service, log_level, fds[0], fds[1], gpu_pair_memory))
            ready = await cls._until_ready(channel)
            arenas = [StagingArena(fd, ready.slot_bytes, ready.num_slots) for fd in fds]
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineDied(f"the engine process ended with status {await process.wait()} while starting") from None
        except ConfigError:
            channel.close()
            await process.wait()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return cls(process, channel, ready, *arenas)

    @staticmethod
    async def _until_ready(channel: RpcEnd) -> Ready:
        due = 0.0
        while True:
            event = await channel.receive()
            match event:
                case Progress(what, done, total):
                    # Often enough for a progress bar, seldom enough for a log.
                    if done == total or time.monotonic() >= due:
                        due = time.monotonic() + _PROGRESS_INTERVAL_S
                        log.info("loading %s", what, extra={"event": "loading", "done": done, "total": total})
                case Ready():
                    return event
                case Refused(message):
                    raise ConfigError(message)

    def send(self, command: Command) -> None:
        self._channel.send(command)

    async def drained(self) -> None:
        """Wait while the engine is so far behind that megabytes of commands wait for it."""
        await self._channel.drained()

    async def outputs(self) -> AsyncIterator[Output]:
        """Yield the engine's outputs. Raises EngineDied when the process ends."""
        while True:
            try:
                event = await self._channel.receive()
            except (asyncio.IncompleteReadError, ConnectionError):
                raise EngineDied(f"the engine process ended with status {await self._process.wait()}") from None
            self._heard = True
            if isinstance(event, Output):
                yield event

    async def watch(self, timeout_s: float) -> None:
        """Kill the engine process when it sends nothing for `timeout_s`. `outputs` then raises EngineDied.

        The time is divided into several waits of this process. If this process itself was stopped for a while, only
        one of the waits is cut short, so the engine is not blamed for that time.
        """
        silent = 0
        while silent < _PINGS:
            self._heard = False
            self._channel.send(Ping())
            await asyncio.sleep(timeout_s / _PINGS)
            silent = 0 if self._heard else silent + 1
        log.error("the engine is killed: it has sent nothing for %g s", timeout_s, extra={"event": "engine_hangs"})
        self._process.kill()

    async def stop(self) -> None:
        """Close the channel, which makes the process end, and wait until it has ended. Kill it if it does not end soon,
        since a device or its driver may hang."""
        self._channel.close()
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            log.error("the engine is killed: it has not ended in %g s", _END_S, extra={"event": "engine_hangs"})
            self._process.kill()
            await self._process.wait()
