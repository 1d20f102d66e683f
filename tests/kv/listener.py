"""An engine process, and all outputs that it has sent so far."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton_engine.config import EngineConfig
from baton_engine.delta import Load, Reservation
from baton_engine.sequence import Request
from baton_worker.engine_client import EngineClient
from baton_worker.messages import Add, Piece, Rejected
from tests.engine.harness import Transcript

_WAIT_S = 30.0


async def start_engine(folder: Path, **settings: Any) -> EngineClient:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_blocks": 64}
    config = EngineConfig(model=str(folder), **{**defaults, **settings})
    return await EngineClient.start(config, "test", "warning")


class Listener:
    """Collects a client's outputs in the background."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.transcript = Transcript()
        self.pieces: list[Piece] = []
        self.reservations: dict[int, Reservation] = {}
        self.rejections: list[Rejected] = []
        self.freed_slots: list[int] = []
        self.imported: list[int] = []
        self.stale: list[int] = []
        self.load: Load | None = None
        self.cached: set[int] = set()  # keys of blocks
        self.error: BaseException | None = None
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._listen())

    def add(self, request: Request, lane: int = 0) -> None:
        self.client.send(Add(request, lane))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds that an output can change."""
        async with asyncio.timeout(_WAIT_S), self._news:
            await self._news.wait_for(lambda: self.error is not None or condition())
        if self.error is not None:
            raise self.error

    async def ended(self, *ids: int) -> None:
        await self.until(lambda: all((id, 0) in self.transcript.reasons for id in ids))

    async def idle(self) -> None:
        """Wait until the engine holds and does nothing. One that was not used yet has said nothing."""
        await self.until(
            lambda: self.load is None or (self.load.blocks_held, self.load.running, self.load.waiting) == (0, 0, 0)
        )

    def bytes_of(self, piece: Piece) -> bytes:
        return bytes(self.client.exports.slot(piece.slot, self.client.ready.layout.size(piece.extent)))

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.client.stop()

    async def _listen(self) -> None:
        try:
            async for output in self.client.outputs():
                async with self._news:
                    self.transcript.take(output.deltas)
                    self.pieces += output.pieces
                    self.reservations |= {reservation.id: reservation for reservation in output.reservations}
                    self.rejections += output.rejections
                    self.freed_slots += output.freed_slots
                    self.imported += [imported.id for imported in output.imported]
                    self.stale += output.stale
                    self.load = output.load or self.load
                    self.cached = self.cached - set(output.blocks_lost) | set(output.blocks_gained)
                    self._news.notify_all()
        except Exception as error:
            async with self._news:
                self.error = error
                self._news.notify_all()
