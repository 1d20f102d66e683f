"""The process that owns the device: it steps the engine and moves KV between its blocks and the staging arenas.

It never waits for the network: a token is not late because the RPC process next to it is busy.
"""

import gc
import logging
import math
import signal
import socket
import sys
import time
from pathlib import Path

import torch

from baton_common.extent import Extent
from baton_common.logging import configure_logging
from baton_engine.config import ConfigError
from baton_engine.engine import Engine
from baton_engine.fingerprint import layout_fingerprint
from baton_kv.staging import StagingArena

from .channel import EngineEnd
from .export_queue import ExportQueue
from .messages import (
    Abort,
    Add,
    CancelImport,
    Command,
    FreeSlot,
    Imported,
    ImportPiece,
    ImportTokens,
    Output,
    Piece,
    Ping,
    Progress,
    Ready,
    Refused,
    Rejected,
    RestartImport,
    Start,
)

log = logging.getLogger(__name__)

_LEAST_SLOT_BYTES = 4 << 20
_NUM_SLOTS = 8
_LOAD_INTERVAL_S = 0.1
_IDLE_S = 1.0


class EngineLoop:
    """Commands in, steps, outputs out, until the other end closes."""

    def __init__(self, channel: EngineEnd, engine: Engine, export_fd: int, import_fd: int) -> None:
        self._channel = channel
        self._engine = engine
        cache = engine.runner.cache
        slot_bytes = max(_LEAST_SLOT_BYTES // cache.token_bytes, 1) * cache.token_bytes
        self._exports = StagingArena.sized(export_fd, slot_bytes, _NUM_SLOTS)
        self._imports = StagingArena.sized(import_fd, slot_bytes, _NUM_SLOTS)
        self._queue = ExportQueue(_NUM_SLOTS, slot_bytes // cache.token_bytes, engine.config.block_size)
        self._lanes: dict[int, int] = {}  # of exporting requests
        self._load_due = 0.0
        self._output = Output()

    def ready(self) -> Ready:
        engine, cache = self._engine, self._engine.runner.cache
        return Ready(
            fingerprint=layout_fingerprint(engine.layout(), Path(engine.config.model)),
            max_model_len=engine.max_model_len,
            vocab_size=engine.model.vocab_size,
            block_size=engine.config.block_size,
            num_blocks=engine.pool.num_blocks,
            num_layers=engine.model.num_layers,
            num_kv_heads=engine.model.num_kv_heads,
            head_bytes=cache.token_bytes // (engine.model.num_layers * engine.model.num_kv_heads),
            slot_bytes=self._exports.slot_bytes,
            num_slots=_NUM_SLOTS,
        )

    def run(self) -> None:
        """Serve until the RPC process is gone (EOFError)."""
        progress = False
        while True:
            self._send()
            # Without progress only a command can change anything: blocks come back, KV arrives, a slot is read.
            idle = not progress and not self._queue.ready
            for command in self._wait() if idle else self._channel.receive(timeout=0):
                self._obey(command)
            result = self._engine.step()
            progress = result.progress
            self._output.deltas += result.deltas
            self._output.reservations += result.reservations
            for export in result.exports:
                self._queue.put(self._lanes[export.id], export)
            self._pack()

    def _wait(self) -> list[Command]:
        commands = self._channel.receive(timeout=_IDLE_S)
        if not commands:
            self._engine.check_integrity()
            commands = self._channel.receive(timeout=None)
        return commands

    def _obey(self, command: Command) -> None:
        engine = self._engine
        match command:
            case Add(request, lane):
                problem = engine.request_error(request)
                if problem is None:
                    engine.add(request)
                    if request.exports_from is not None:
                        self._lanes[request.id] = lane
                else:
                    self._output.rejections.append(Rejected(request.id, *problem))
            case Abort(id, choice):
                engine.abort(id, choice)
                if self._lanes.pop(id, None) is not None:
                    self._queue.drop(id)
            case ImportPiece():
                self._unpack(command)
            case ImportTokens(id, tokens):
                engine.import_tokens(id, tokens)
            case RestartImport(id):
                reservation = engine.restart_import(id)
                if reservation is not None:
                    self._output.reservations.append(reservation)
            case CancelImport(id):
                engine.cancel_import(id)
            case FreeSlot(slot):
                self._queue.free(slot)
            case Ping():
                self._load_due = 0.0
            case Start():
                raise RuntimeError("the engine has started already")

    def _pack(self) -> None:
        """Put KV of exporting requests that is complete into free slots."""
        cache = self._engine.runner.cache
        while (taken := self._queue.take()) is not None:
            export, slot = taken
            extent = self._engine.extent(export.first_token, export.num_tokens)
            cache.gather(export.blocks, extent, self._view(self._exports, slot, extent))
            self._output.pieces.append(Piece(export.id, extent, slot))

    def _unpack(self, piece: ImportPiece) -> None:
        values = self._view(self._imports, piece.slot, piece.extent)
        complete = self._engine.import_kv(piece.id, piece.generation, piece.extent, values)
        self._output.freed_slots.append(piece.slot)
        if complete is None:
            self._output.stale.append(piece.id)
        elif complete:
            self._output.imported.append(Imported(piece.id, piece.generation))

    def _view(self, arena: StagingArena, slot: int, extent: Extent) -> torch.Tensor:
        """Return a slot as [layers, 2, tokens, kv_heads, head_dim] of an extent."""
        data = self._engine.runner.cache.data
        shape = (extent.num_layers, 2, extent.num_tokens, extent.num_heads, data.shape[-1])
        start, count = slot * arena.slot_bytes, math.prod(shape)
        return torch.frombuffer(arena.buffer, dtype=data.dtype, count=count, offset=start).view(shape)

    def _send(self) -> None:
        now = time.monotonic()
        if now >= self._load_due or not self._engine.has_work:
            self._output.load = self._engine.load()
            self._load_due = now + _LOAD_INTERVAL_S
        if self._output != Output():
            self._channel.send(self._output)
            self._output = Output()


def main() -> None:
    """Entry point of the child process; its argument is the descriptor of the channel."""
    # Ctrl-C goes to the whole terminal; the RPC process decides when the engine ends, by closing the channel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    [start] = channel.receive(timeout=None)
    if not isinstance(start, Start):
        raise RuntimeError(f"expected Start, got {start!r}")
    configure_logging(start.service, start.log_level)
    try:
        engine = Engine(start.config, lambda what, done, total: channel.send(Progress(what, done, total)))
    except ConfigError as error:
        channel.send(Refused(str(error)))
        return
    loop = EngineLoop(channel, engine, start.export_fd, start.import_fd)
    # What lives now lives as long as the process: the collector need not walk it between steps.
    gc.freeze()
    channel.send(loop.ready())
    try:
        loop.run()
    except (EOFError, ConnectionError):
        log.info("the RPC process has closed the channel")


if __name__ == "__main__":
    main()
