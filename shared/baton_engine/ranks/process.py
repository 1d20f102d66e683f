"""The process of one rank, which executes the commands of the engine process and decides nothing itself."""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from baton_common.logging import configure_logging
from baton_engine.config import ConfigError
from baton_engine.executor import LaunchedHere
from baton_engine.pairs.messages import PackParts, Report, UnpackParts
from baton_engine.pairs.rank_end import RankEnd
from baton_engine.runner import Runner
from baton_engine.runners import make_local_runner, read_model

from .board import Board
from .device import rank_config
from .errors import CollectiveError
from .group import Group
from .kv_part import KvPart, SeatKv, pin
from .messages import (
    Alive,
    DrawMasked,
    Failed,
    Gather,
    Launch,
    Loaded,
    Reply,
    Reports,
    Scatter,
    Start,
    Stop,
    Work,
    decode,
)
from .results_sender import ResultsSender
from .ring import RingReader, RingWriter, map_memory
from .seat import Seat
from .step_fences import StepFences

log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.2
# A rank with a GPU spins for this long before it sleeps: the next plan comes within a step, and waking up at each step
# would take longer.
_SPIN_S = 0.002
# While transfers run, a rank checks this often whether they are over.
_POLL_S = 0.00005


class Rank:
    """Serves one model, until the engine process is gone or starts another model."""

    def __init__(
        self,
        start: Start,
        ring: RingReader,
        board: Board,
        sock: socket.socket,
        confirmed: int,
        exchange: torch.Tensor,
        results: RingWriter,
        failed: Callable[[Exception], None],
    ) -> None:
        """sock: for replies. confirmed: the counter of confirmations. exchange: memory shared with the engine process.
        results: the ring for results. failed: ends this process when a step fails in the thread that sends results.
        """
        config = rank_config(start.config, start.rank)
        device = torch.device(config.device)
        self._number, self._ring, self._board = start.rank, ring, board
        self._socket, self._confirmed, self._exchange = sock, confirmed, exchange
        seat = Seat.of(config, start.rank)
        group = Group(seat, Path(start.folder), device, lambda: board.work(start.rank), config.symmetric_memory)
        model = read_model(config)
        self._runner: Runner = make_local_runner(config, model, device.type, None, group, group.stage)
        layout = model.kv_layout(self._runner.cache.layout.planes[0].dtype)
        self._own = SeatKv(layout, seat)
        self._sender = ResultsSender(results, failed) if seat.reports else None
        self._part = KvPart(self._runner.cache)
        self._end = RankEnd(self._runner.cache, layout, seat.rank, seat.ranks)
        self._reports: list[Report] = []
        self._launched: LaunchedHere | None = None
        self._fences = StepFences()
        if device.type == "cuda":
            pin(exchange)
            ring.spin_s = _SPIN_S

    def run(self) -> None:
        """Execute commands until Stop. Raises EOFError when the engine process is gone."""
        while True:
            if self._end.busy or self._reports:
                self._report()
                if not self._ring.arrived(_POLL_S):
                    continue
            command = decode(self._ring.receive())
            self._board.work(self._number)
            if isinstance(command, Stop):
                if self._sender is not None:
                    self._sender.stop()
                self._runner.close()
                return
            self._execute(command)

    def _execute(self, command: Work) -> None:
        match command:
            case Launch(plan, drawn):
                self._runner.learn(drawn)
                self._launched = self._runner.launch(plan)
                self._fences.add(self._launched, self._runner.fence())
                if not plan.masked:
                    self._send_results(self._launched)
            case DrawMasked(masks):
                assert self._launched is not None
                self._launched.draw_masked(masks)
                self._send_results(self._launched)
            case Gather(tables, extent):
                found = self._own.within(extent)
                if found is not None and self._own.owns:
                    self._part.gather(tables, found.extent, self._exchange[: self._part.size(found.extent)])
                os.eventfd_write(self._confirmed, 1)
            case Scatter(tables, extent):
                found = self._own.within(extent)
                if found is not None:
                    self._part.scatter(tables, found.extent, self._exchange[: self._part.size(found.extent)])
                os.eventfd_write(self._confirmed, 1)
            case PackParts(behind=mark) | UnpackParts(behind=mark) if mark is not None:
                self._end.execute(command, self._fences.at(mark))
            case _:
                self._end.execute(command)

    def _report(self) -> None:
        """Send the reports about pairs. Reports that do not fit into the socket's buffer are sent later."""
        self._reports += self._end.settle()
        if self._reports:
            with contextlib.suppress(BlockingIOError):
                self._socket.send(msgspec.json.encode(Reports(self._reports)), socket.MSG_DONTWAIT)
                self._reports = []

    def _send_results(self, launched: LaunchedHere) -> None:
        """Send the results of a step, whose draws have been launched, to the engine process."""
        if self._sender is not None:
            self._sender.put(launched)


def _heartbeat(board: Board, rank: int, parent: int) -> None:
    """Send heartbeats, and end this process when the engine process is gone."""
    while True:
        board.beat(rank)
        if os.getppid() != parent:
            os._exit(1)
        time.sleep(_HEARTBEAT_S)


def _fail(sock: socket.socket, message: Failed) -> None:
    sock.send(msgspec.json.encode(message))
    # A normal exit would wait for work on the GPU, which may wait for other ranks for ever.
    os._exit(1)


def main() -> None:
    """Entry point. The arguments are the rank's number and the descriptors that RankProcesses passes on."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number, control, ring, board_fd, new, taken, confirmed, exchange, results, *counters = map(int, sys.argv[1:])
    sock, board = socket.socket(fileno=control), Board(board_fd)
    threading.Thread(target=_heartbeat, args=(board, number, parent), daemon=True).start()
    reader = RingReader(ring, new, taken, control)
    memory = torch.frombuffer(map_memory(exchange), dtype=torch.uint8)
    # When the engine process is gone, `_heartbeat` ends this one.
    writer = RingWriter(results, [(counters[0], counters[1])], lambda: None)

    def reply(message: Reply) -> None:
        sock.send(msgspec.json.encode(message))

    def failed(error: Exception) -> None:
        log.error("rank %d failed", number, exc_info=error)
        _fail(sock, Failed(repr(error)))

    reply(Alive())
    while data := sock.recv(1 << 20):
        start = msgspec.json.decode(data, type=Start)
        configure_logging(f"rank-{start.rank}", logging.getLevelName(start.log_level).lower())
        try:
            rank = Rank(start, reader, board, sock, confirmed, memory, writer, failed)
            reply(Loaded())
            rank.run()
        except EOFError:
            break
        except ConfigError as error:
            _fail(sock, Failed(str(error), in_settings=True))
        except CollectiveError as error:
            _fail(sock, Failed(str(error), of_others=True))
        except Exception as error:
            failed(error)
        del rank
        gc.collect()
    # The engine process is gone. A normal exit of the interpreter would wait for NCCL operations in CUDA graphs.
    os._exit(0)
