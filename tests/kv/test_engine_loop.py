"""What the engine's loop sends while nothing happens."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from baton_kv.staging import StagingArena
from baton_worker.channel import EngineEnd, encode
from baton_worker.engine_process import EngineLoop
from baton_worker.kv_mover import KvMover
from baton_worker.messages import Abort, Add, Command, Event, Output, Ping, Start
from baton_worker.pair_memory import PairMemory
from tests.conftest import MakeModel
from tests.engine.harness import make_engine, make_prompt, make_request

_QUIET_S = 0.5
_WAIT_S = 10.0


class LoopInThread:
    """An engine's loop, and the other end of its channel."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = socket.socketpair()
        engine = make_engine(folder, export_fraction=0.01)  # a second export waits for the first
        fds = [StagingArena.create_file("exports"), StagingArena.create_file("imports")]
        self._loop = EngineLoop(EngineEnd(theirs), engine, Start(engine.config, "test", "warning", *fds), PairMemory())
        for fd in fds:
            os.close(fd)
        self._pending = b""
        self.may_launch = threading.Event()
        self.may_launch.set()
        launch = engine.runner.launch
        engine.runner.launch = lambda plan: (self.may_launch.wait(_WAIT_S), launch(plan))[1]  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            self._loop.run()

    def send(self, *commands: Command) -> None:
        self._ours.sendall(b"".join(map(encode, commands)))

    def outputs(self, seconds: float) -> Iterator[Output]:
        """Yield what comes within a time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._ours.settimeout(left)
            try:
                self._pending += self._ours.recv(1 << 20)
            except TimeoutError:
                return
            while len(self._pending) >= 4 and len(self._pending) >= 4 + int.from_bytes(self._pending[:4], "little"):
                end = 4 + int.from_bytes(self._pending[:4], "little")
                message, self._pending = self._pending[4:end], self._pending[end:]
                output = msgspec.msgpack.decode(message, type=Event)
                assert isinstance(output, Output)
                yield output

    def close(self) -> None:
        self._ours.close()
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture(params=["idle", "polls"])
def loop(
    tiny_model: MakeModel, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoopInThread]:
    """Both kinds of waiting: for a command alone, and for copies and transfers too, which are polled."""
    monkeypatch.setattr(KvMover, "busy", request.param == "polls")
    loop = LoopInThread(tiny_model("llama"))
    yield loop
    loop.close()


def test_an_engine_with_nothing_to_say_says_nothing(loop: LoopInThread) -> None:
    [first] = [output.load for output in loop.outputs(_QUIET_S)]
    assert first is not None
    assert first.blocks_held == 0
    assert list(loop.outputs(_QUIET_S)) == []


def test_an_engine_that_waits_for_kv_says_so_once(loop: LoopInThread) -> None:
    loop.send(Add(make_request(1, make_prompt(40), imports_kv=True)))
    outputs = list(loop.outputs(_QUIET_S))
    assert [reservation.id for output in outputs for reservation in output.reservations] == [1]
    assert [load.blocks_held for output in outputs if (load := output.load) is not None][-1] == 3
    assert len(outputs) <= 3
    assert list(loop.outputs(_QUIET_S)) == []
    loop.send(Abort(1))
    assert next(load.blocks_held for output in loop.outputs(_WAIT_S) if (load := output.load) is not None) == 0


def test_prefill_pods_get_their_orders_before_the_next_step_begins(loop: LoopInThread) -> None:
    """A step with a long prompt takes a hundred times as long as an order."""
    loop.may_launch.clear()
    loop.send(Add(make_request(1, make_prompt(40), 1)), Add(make_request(2, make_prompt(40), imports_kv=True)))
    outputs = loop.outputs(_WAIT_S)
    assert next(output.reservations[0].id for output in outputs if output.reservations) == 2
    loop.may_launch.set()
    assert next(output.deltas[0].id for output in outputs if output.deltas) == 1


def test_a_ping_is_answered_though_there_is_no_news(loop: LoopInThread) -> None:
    list(loop.outputs(_QUIET_S))
    for _ in range(3):
        loop.send(Ping())
        assert next(loop.outputs(_WAIT_S)).load is not None
    assert list(loop.outputs(_QUIET_S)) == []


def test_what_waits_for_a_command_is_told(loop: LoopInThread) -> None:
    """The second export comes right after a load was sent, and nothing happens until somebody receives the first."""
    for id in range(2):
        loop.send(Add(make_request(id, make_prompt(40, seed=id), 1, exports_from=0)))
        loads = [output.load for output in loop.outputs(0.05 if id == 0 else _QUIET_S) if output.load is not None]
    assert (loads[-1].waiting, loads[-1].queued_prefill_tokens, loads[-1].blocks_held) == (1, 40, 3)


def test_the_last_step_is_told_though_no_count_but_its_own_has_changed(loop: LoopInThread) -> None:
    """Between two such requests nothing differs but counters, and one of them lives on in what was sent before."""
    told = []
    for id in range(2):
        loop.send(Add(make_request(id, make_prompt(5), 1)))
        told.append([load.step_tokens for output in loop.outputs(_QUIET_S) if (load := output.load) is not None][-1])
    assert [histogram.total for histogram in told if histogram is not None] == [5, 10]
