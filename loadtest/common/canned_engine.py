"""An engine that computes nothing: each KV export succeeds at once, and imported KV is discarded."""

import asyncio
import os
from collections.abc import Callable

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.delta import Delta, Reservation
from baton_engine.exports import Export
from baton_kv.staging import StagingArena
from baton_worker.export_queue import ExportQueue
from baton_worker.messages import Abort, Add, Command, FreeSlot, Imported, ImportPiece, Output, Piece, Ready

BLOCK_SIZE = 64


class CannedEngine:
    """Replaces EngineClient within the RPC process. `take` receives the outputs that an engine process would send."""

    first_token = 0

    def __init__(self, *, num_layers: int, num_heads: int, head_dim: int, slot_bytes: int, num_slots: int) -> None:
        planes = (Plane(name, num_heads, head_dim, "bfloat16") for name in ("key", "value"))
        layout = KvLayout(num_layers, tuple(planes))
        self._token_bytes = layout.token_bytes
        slot_bytes = max(slot_bytes // self._token_bytes, 1) * self._token_bytes
        self.ready = Ready(
            fingerprint="canned",
            max_model_len=1 << 20,
            vocab_size=1 << 20,
            block_size=BLOCK_SIZE,
            num_blocks=1 << 14,
            layout=layout,
            slot_bytes=slot_bytes,
            num_slots=num_slots,
        )
        self.exports, self.imports = (_arena(slot_bytes, num_slots) for _ in range(2))
        self.import_slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(num_slots):
            self.import_slots.put_nowait(slot)
        self.take: Callable[[Output], None] = lambda output: None
        self.imported = asyncio.Event()
        self._queue = ExportQueue(num_slots, slot_bytes // self._token_bytes * num_layers, BLOCK_SIZE)
        self._left: dict[int, int] = {}  # tokens that each import still waits for

    async def drained(self) -> None:
        """Return at once, because each command is executed when it is sent."""

    def send(self, command: Command) -> None:
        match command:
            case Add(request, lane) if request.exports_from is not None:
                extent = self.ready.layout.extent(0, len(request.prompt))
                self._queue.put(lane, Export(request.id, extent, []))
                self.take(Output(deltas=[Delta(request.id, 0, 0, [self.first_token], [], cached_tokens=0)]))
                self._pack()
            case Add(request):
                self._left[request.id] = len(request.prompt)
                self._say(Output(reservations=[Reservation(request.id, 0, len(request.prompt), 1, 0)]))
            case FreeSlot(slot):
                self._queue.free(slot)
                self._pack()
            case ImportPiece(id, _, extent, slot):
                self._left[id] -= extent.num_tokens
                imported = [] if self._left[id] else [Imported(id, 1)]
                self._say(Output(freed_slots=[slot], imported=imported))
                if imported:
                    self.imported.set()
            case Abort(id):
                self._queue.drop(id)

    def _say(self, output: Output) -> None:
        asyncio.get_running_loop().call_soon(self.take, output)

    def _pack(self) -> None:
        while (taken := self._queue.take()) is not None:
            export, slot = taken
            self._say(Output(pieces=[Piece(export.id, export.extent, slot)]))


def _arena(slot_bytes: int, num_slots: int) -> StagingArena:
    fd = StagingArena.create_file("canned")
    try:
        return StagingArena.sized(fd, slot_bytes, num_slots)
    finally:
        os.close(fd)
