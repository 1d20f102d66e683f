"""The process that owns the device: it steps the engine and moves KV between its blocks and the staging arenas.

It never waits for the network, so a busy RPC process beside it does not delay tokens.
"""

import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from baton_common.block_hash import block_key
from baton_common.logging import configure_logging
from baton_engine.config import ConfigError
from baton_engine.device import find_device
from baton_engine.engine import Engine
from baton_engine.fingerprint import layout_fingerprint
from baton_engine.pair_ends import make_pair_ends
from baton_engine.pairs.nccl import gpu_ids
from baton_engine.ranks.processes import RankDied

from . import pair_memory
from .channel import EngineEnd
from .kv_mover import KvMover
from .messages import (
    Abort,
    Add,
    CancelImport,
    ClosePair,
    Command,
    FreeSlot,
    GrantPair,
    ImportPiece,
    ImportTokens,
    JoinPair,
    OpenPair,
    Output,
    Ping,
    Progress,
    Ready,
    ReceivePiece,
    Refused,
    Rejected,
    RestartImport,
    SendPiece,
    Start,
    UsePair,
)
from .pair_memory import LANDING_SLOTS, PairMemory

log = logging.getLogger(__name__)

_LOAD_INTERVAL_S = 0.1
_MOST_KEYS = 2_048  # in one message, so that sending it does not delay a step
_IDLE_S = 1.0
_POLL_S = 0.0001


class EngineLoop:
    """Executes commands, steps the engine and sends outputs, until the other end closes the channel."""

    def __init__(self, channel: EngineEnd, engine: Engine, start: Start, pairs: PairMemory) -> None:
        self._channel = channel
        self._engine = engine
        self._mover = KvMover(engine, make_pair_ends(engine.runner), start.export_fd, start.import_fd, pairs)
        self._load_due = 0.0
        self._last_load = b""  # the last load that was sent, encoded

    def ready(self) -> Ready:
        engine, cache, threads = self._engine, self._engine.runner.cache, self._engine.runner.threads
        pairs = self._mover.most_pairs
        return Ready(
            fingerprint=layout_fingerprint(engine.fingerprint_facts(), Path(engine.config.model)),
            max_model_len=engine.max_model_len,
            vocab_size=engine.model.vocab_size,
            block_size=engine.config.block_size,
            num_blocks=engine.pool.num_blocks,
            layout=cache.layout,
            kv_format=cache.format,
            slot_bytes=self._mover.exports.slot_bytes,
            num_slots=self._mover.exports.num_slots,
            gpu_slot_bytes=self._mover.gpu_slot_bytes,
            gpu_pairs=pairs,
            gpu_landing_slots=LANDING_SLOTS,
            gpus=gpu_ids(find_device(engine.config.device), engine.config.tensor_parallel) if pairs else [],
            prefill_rate=engine.runner.times.prefill_rate,
            step_tokens=engine.scheduler.step_tokens,
            num_threads=threads.count if threads is not None else 0,
            threads_spin=threads is not None and threads.spin,
            max_num_seqs=engine.config.max_num_seqs,
        )

    def run(self) -> None:
        """Serve until the RPC process is gone, which raises EOFError."""
        engine, mover = self._engine, self._mover
        progress = False
        while True:
            for command in self._next_commands(progress):
                self._execute(command)
            mover.settle()
            # Prefill pods can begin before this engine has launched its next step.
            mover.output.reservations += engine.reserve()
            self._send()
            result = engine.step(self._on_wait)
            progress = result.progress
            mover.output.deltas += result.deltas
            mover.output.reservations += result.reservations
            for id, param, message in result.rejections:
                mover.output.rejections.append(Rejected(id, param, message))
                mover.drop(id)
            for id in result.broken:
                mover.output.broken.append(id)
                mover.drop(id)
            # First tokens need not wait until the copies of their KV have been launched.
            self._send()
            for export in result.exports:
                mover.put(export)
            mover.pack()

    def _next_commands(self, progress: bool) -> list[Command]:
        if progress or self._mover.ready:
            return self._channel.receive(timeout=0)
        if self._mover.busy:
            return self._channel.receive(timeout=_POLL_S)
        # Only a command can bring new work now: it frees blocks, brings KV or frees a slot. Requests may wait for this
        # command, so the load is sent as soon as it is due, before a long wait.
        self._send()
        commands = self._channel.receive(timeout=max(self._load_due - time.monotonic(), 0))
        if not commands:
            self._send()
            commands = self._channel.receive(timeout=_IDLE_S)
        if not commands:
            self._engine.check_integrity()
            commands = self._channel.receive(timeout=None)
        return commands

    def _on_wait(self) -> None:
        """Do the work that need not wait for the step that the device is computing."""
        for command in self._channel.receive(timeout=_POLL_S):
            self._execute(command)
        self._mover.output.reservations += self._engine.reserve()
        for export in self._engine.early_exports():
            self._mover.put(export)
        self._mover.settle()
        self._mover.pack()
        self._send()

    def _execute(self, command: Command) -> None:
        engine, mover = self._engine, self._mover
        match command:
            case Add(request, lane):
                problem = engine.request_error(request)
                if problem is None:
                    engine.add(request)
                    if request.exports_from is not None:
                        mover.expect(request.id, lane)
                else:
                    mover.output.rejections.append(Rejected(request.id, *problem))
            case Abort(id, choice):
                engine.abort(id, choice)
                mover.drop(id)
            case ImportPiece():
                mover.unpack(command)
            case ImportTokens(id, tokens):
                engine.import_tokens(id, tokens)
            case RestartImport(id):
                engine.restart_import(id)
            case CancelImport(id):
                engine.cancel_import(id)
            case FreeSlot(slot, on_gpu):
                mover.free(slot, on_gpu)
            case Ping():
                self._load_due, self._last_load = 0.0, b""
            case SendPiece():
                mover.send(command)
            case ReceivePiece():
                mover.receive(command)
            case OpenPair() | JoinPair():
                mover.begin_pair(command)
            case UsePair(pair, check, credit):
                mover.use_pair(pair, check, credit)
            case GrantPair(pair, pieces):
                mover.grant_pair(pair, pieces)
            case ClosePair(pair):
                mover.close_pair(pair)
            case Start():
                raise RuntimeError("the engine has started already")

    def _send(self) -> None:
        output, now = self._mover.output, time.monotonic()
        if now >= self._load_due or not self._engine.has_work:
            load = self._engine.load()
            # The load contains the engine's own histogram, which goes on counting, so compare encoded copies.
            copied = msgspec.msgpack.encode(load)
            if copied != self._last_load:
                output.load, self._last_load = load, copied
            self._load_due = now + _LOAD_INTERVAL_S
            gained, lost = self._engine.pool.changes.take(_MOST_KEYS)
            output.blocks_gained = [block_key(digest) for digest in gained]
            output.blocks_lost = [block_key(digest) for digest in lost]
        if output != Output():
            self._mover.output = Output()
            self._channel.send(output)


def main() -> None:
    """Entry point of the child process; its argument is the descriptor of the channel."""
    # Ctrl-C reaches this process too, but the RPC process decides when the engine ends, by closing the channel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    [start] = channel.receive(timeout=None)
    if not isinstance(start, Start):
        raise RuntimeError(f"expected Start, got {start!r}")
    configure_logging(start.service, start.log_level)
    run(channel, start)


def run(channel: EngineEnd, start: Start) -> NoReturn:
    """Serve until the RPC process closes the channel, and end this process."""
    status = 0
    try:
        config = start.config
        part = start.gpu_pair_memory
        if part and config.pipeline_parallel > 1:
            log.info("no GPU pairs: KV of stages goes through the host", extra={"event": "gpu_pairs", "most": 0})
            part = 0.0
        pairs = pair_memory.set_aside(find_device(config.device), part, sends=config.prefill_only)
        config = msgspec.structs.replace(config, set_aside_bytes=pairs.set_aside)
        engine = Engine(config, lambda what, done, total: channel.send(Progress(what, done, total)))
        loop = EngineLoop(channel, engine, start, pairs)
        # The objects that exist now live as long as the process, so the garbage collector need not scan them.
        gc.freeze()
        engine.runner.begin_service()
        channel.send(loop.ready())
        loop.run()
    except ConfigError as error:
        channel.send(Refused(str(error)))
    except (EOFError, ConnectionError):
        log.info("the RPC process has closed the channel")
    except RankDied as error:
        log.error("%s", error, extra={"event": "rank_died"})
        status = 1
    except Exception as error:
        log.error("the engine has failed", exc_info=error, extra={"event": "engine_failed"})
        status = 1
    # Streams resume elsewhere only when this process is gone. A normal exit of the interpreter takes a second with
    # torch, and waits for NCCL operations in CUDA graphs. So does the end of the engine's life, if it ended before this
    # process: NCCL once waited for a connection whose other end had ended at the same time, for ever.
    os._exit(status)
