"""The processes of all ranks but the first one, which is the engine process itself."""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from baton_engine.config import ConfigError, EngineConfig
from baton_engine.pairs.messages import Report
from baton_engine.results import Results

from .board import Board
from .errors import CollectiveError
from .group import Group
from .messages import Alive, Command, Failed, Loaded, Reply, Reports, Start, Stop, encode
from .results_sender import decode_results
from .ring import RING_BYTES, RingReader, RingWriter, create_counter, create_memory, map_memory, read_counter
from .seat import Seat

log = logging.getLogger(__name__)

# The module that other ranks run.
RANK_MODULE = "baton_engine.ranks.process"
# The memory in which each rank exchanges KV with the engine process.
EXCHANGE_BYTES = 4 << 20
_WATCH_S = 0.2
_SILENT_S = 3.0  # a rank without a heartbeat for this long hangs
_SILENT_LOADING_S = 30.0  # the same while models are loaded: libraries may hold the interpreter lock for long
_BEHIND_S = 4.0  # a rank that is behind all others for this long hangs
_EVIDENCE_S = 2.0
_MESSAGE_BYTES = 1 << 20


class RankDied(RuntimeError):
    """A rank has ended or hangs, so the engine must end too. The message names the rank and the reason."""


class _Rank:
    """One rank's process, and this process's ends of the connections to it."""

    def __init__(self, number: int, ring: int, board: int, results: tuple[int, int, int]) -> None:
        """results: the memory and the counters of the ring for results."""
        self.number = number
        self.failed: Failed | None = None
        self.new, self.taken, self.confirmed = (create_counter() for _ in range(3))
        exchange = create_memory("baton-exchange", EXCHANGE_BYTES)
        self.exchange = torch.frombuffer(map_memory(exchange), dtype=torch.uint8)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket = ours
        arguments = (number, theirs.fileno(), ring, board, self.new, self.taken, self.confirmed, exchange, *results)
        fds = arguments[1:]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "baton_common.start", RANK_MODULE, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )
        theirs.close()
        os.close(exchange)

    def receive(self, timeout: float) -> Reply | None:
        """Return the next reply; None if none comes in time, or none can come any more."""
        # The watching thread may take a message after this thread has seen that there is one.
        with contextlib.suppress(ConnectionError, BlockingIOError):
            readable, _, _ = select.select([self.socket], [], [], timeout)
            if readable and (data := self.socket.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)):
                reply: Reply = msgspec.json.decode(data, type=Reply)
                if isinstance(reply, Failed):
                    self.failed = reply
                return reply
        return None

    def ending(self) -> str | None:
        """Return how the process has ended; None if it still runs."""
        status = self.process.poll()
        if status is None:
            return None
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.socket.close()
        for counter in (self.new, self.taken, self.confirmed):
            os.close(counter)


def end_process(problem: str) -> None:
    """Exit this process at once, since its main thread may wait for a rank that never answers."""
    os._exit(1)


class RankProcesses:
    """Starts the processes and watches them. They serve one model at a time, between `begin` and `stop`.

    end: called with the problem, in the thread that watches, when a rank has ended or hangs.
    """

    def __init__(self, ranks: int, stages: int = 1, end: Callable[[str], None] = end_process) -> None:
        """ranks: of each stage. stages: of the pipeline."""
        self.count = count = ranks * stages
        self.seats = [Seat(number, ranks, stages) for number in range(count)]
        self._end = end
        ring, board = create_memory("baton-plans", RING_BYTES), Board.create(count)
        results = create_memory("baton-results", RING_BYTES)
        self._board = Board(board)
        self._counters = create_counter(), create_counter()
        self.ranks = [_Rank(number, ring, board, (results, *self._counters)) for number in range(1, count)]
        self._ring = RingWriter(ring, [(rank.new, rank.taken) for rank in self.ranks], self.check)
        # With several stages, the first rank of the last stage sends results.
        reporting = self.ranks[(stages - 1) * ranks - 1]
        self._results = RingReader(results, *self._counters, reporting.socket.fileno())
        for fd in (ring, board, results):
            os.close(fd)
        self._problem: str | None = None
        self._closed = threading.Event()
        self._armed = False  # whether ranks are expected to keep up with each other
        self._base = [0] * count
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._watcher = threading.Thread(target=self._watch, name="watch ranks", daemon=True)
        self._watcher.start()
        try:
            for rank in self.ranks:
                self._expect(rank, Alive)
        except BaseException:
            self.close()
            raise

    def begin(self, config: EngineConfig, device: torch.device) -> Group:
        """Let the ranks load their parts of a model. Return the group in which this process is rank 0.

        Raises CollectiveError if the ranks cannot be connected.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-", ignore_cleanup_errors=True)
        level = logging.getLogger().getEffectiveLevel()
        for rank in self.ranks:
            rank.socket.send(msgspec.json.encode(Start(config, rank.number, self._folder.name, level)))
        folder, work = Path(self._folder.name), lambda: self._board.work(0)
        return Group(self.seats[0], folder, device, work, config.symmetric_memory)

    def await_loaded(self) -> None:
        """Wait until all ranks can run plans. From then on, hanging ranks are detected."""
        for rank in self.ranks:
            self._expect(rank, Loaded)
        self._remove_folder()
        self._base = [self._board.done(number) for number in range(self.count)]
        self._armed = True

    def send(self, command: Command) -> None:
        """Send a command to all ranks."""
        self._ring.send(encode(command))
        self._board.work(0)

    def take_reports(self) -> list[tuple[int, Report]]:
        """As in OtherRanks."""
        taken: list[tuple[int, Report]] = []
        for rank in self.ranks:
            while isinstance(reply := rank.receive(0), Reports):
                taken += [(rank.number, report) for report in reply.reports]
        return taken

    def await_confirmations(self) -> None:
        """Wait until each rank has confirmed one command."""
        for rank in self.ranks:
            while not read_counter(rank.confirmed):
                self.check()
                select.select([rank.confirmed], [], [], _WATCH_S)

    def results_arrived(self) -> bool:
        """Whether `receive_results` returns at once."""
        return self._results.arrived()

    def receive_results(self) -> Results:
        """Wait for the results of the oldest step that the last stage has not reported. Raises RankDied."""
        while not self._results.arrived(_WATCH_S):
            self.check()
        try:
            return decode_results(self._results.receive())
        except EOFError:
            raise RankDied(self._find_problem() or "the last stage is gone") from None

    def check(self) -> None:
        """Raise RankDied if a rank has ended or hangs."""
        if self._problem is not None:
            raise RankDied(self._problem)

    @contextlib.contextmanager
    def explained(self, kind: type[ConfigError | RankDied]) -> Iterator[None]:
        """When a collective operation fails in this context, raise an error of this kind that names the faulty rank."""
        try:
            yield
        except CollectiveError as error:
            until = time.monotonic() + _EVIDENCE_S
            while (problem := self._find_problem()) is None and time.monotonic() < until:
                time.sleep(0.01)
            raise kind(problem or f"{self.seats[0].name}: {error}") from error

    def stop(self) -> None:
        """Let the ranks free their model."""
        self._armed = False
        self.send(Stop())

    def close(self) -> None:
        """End the processes."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watcher.join()
        self._remove_folder()
        for rank in self.ranks:
            rank.close()
        for counter in self._counters:
            os.close(counter)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _expect(self, rank: _Rank, kind: type[Reply]) -> None:
        while True:
            reply = rank.receive(_WATCH_S)
            if isinstance(reply, kind):
                return
            if isinstance(reply, Failed) or rank.ending():
                problem = self._find_problem() or f"{self.seats[rank.number].name} failed"
                raise ConfigError(problem) if rank.failed and rank.failed.in_settings else RankDied(problem)

    def _find_problem(self) -> str | None:
        """Return the problem of the rank that caused a failure; None if every rank seems well."""
        for rank in self.ranks:
            while rank.failed is None and rank.receive(0):
                pass
        to_blame = [rank for rank in self.ranks if rank.failed and not rank.failed.of_others]
        for rank in to_blame:
            assert rank.failed is not None
            return f"{self.seats[rank.number].name}: {rank.failed.message}"
        for rank in self.ranks:
            if rank.failed is None and (ending := rank.ending()):
                return f"{self.seats[rank.number].name} {ending}"
        return None

    def _watch(self) -> None:
        silent, behind = [0] * self.count, [0] * self.count
        beats, done = [0] * self.count, [0] * self.count
        # Intervals are counted instead of seconds, so that a pause of this process itself does not count.
        while not self._closed.wait(_WATCH_S):
            if any(rank.process.poll() is not None for rank in self.ranks):
                self._report("a rank has ended")
                return
            reached = [self._board.done(number) - self._base[number] for number in range(self.count)]
            for rank in self.ranks:
                number = rank.number
                # Ranks are compared within a stage only: stages do different work for a command, at different times.
                furthest = max(
                    each
                    for each, seat in zip(reached, self.seats, strict=True)
                    if seat.stage_number == self.seats[number].stage_number
                )
                beat, work = self._board.beats(number), self._board.done(number)
                silent[number] = silent[number] + 1 if beat == beats[number] and beat else 0
                late = self._armed and work == done[number] and work - self._base[number] < furthest
                behind[number] = behind[number] + 1 if late else 0
                beats[number], done[number] = beat, work
                if silent[number] * _WATCH_S > (_SILENT_S if self._armed else _SILENT_LOADING_S):
                    self._report(f"{self.seats[number].name} hangs: it sends no heartbeat")
                    return
                if behind[number] * _WATCH_S > _BEHIND_S:
                    self._report(f"{self.seats[number].name} hangs: all others wait for it")
                    return

    def _report(self, problem: str) -> None:
        """Report a problem to the main thread, and end this process if the main thread does not react."""
        loading = not self._armed
        # While ranks load, the main thread reads their replies itself and can raise a better error.
        if self._closed.wait(_EVIDENCE_S if loading else 0.1):
            return
        self._problem = problem if "hangs" in problem else self._find_problem() or problem
        log.error("the engine ends: %s", self._problem, extra={"event": "rank_died"})
        if self._closed.wait(0.5):
            return
        for rank in self.ranks:
            rank.process.kill()
        self._remove_folder()
        self._end(self._problem)
