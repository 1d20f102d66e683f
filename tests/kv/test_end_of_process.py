"""How the process that owns the device ends."""

import gc
import os
import socket
import weakref
from typing import Any, NoReturn

import pytest

from baton_engine.engine import Engine
from baton_engine.ranks.processes import RankDied
from baton_kv.staging import StagingArena
from baton_worker import engine_process
from baton_worker.channel import EngineEnd
from baton_worker.messages import Start
from tests.conftest import MakeModel
from tests.engine.harness import make_engine


class _EndedError(BaseException):
    pass


@pytest.mark.parametrize("problem", [None, RankDied("rank 1 ended"), RuntimeError("broken")])
def test_the_process_ends_while_its_engine_exists(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, problem: Exception | None
) -> None:
    """The end of an engine's life waits for NCCL, perhaps for ever."""
    ours, theirs = socket.socketpair()
    engines: list[weakref.ref[Engine]] = []
    ends: list[tuple[int, bool]] = []

    def make(config: Any, progress: object) -> Engine:
        engine = Engine(config)
        engines.append(weakref.ref(engine))
        ours.close()
        return engine

    def serve(loop: Any) -> NoReturn:
        raise EOFError if problem is None else problem

    def end(status: int) -> NoReturn:
        gc.collect()
        ends.append((status, engines[0]() is not None))
        raise _EndedError

    monkeypatch.setattr(engine_process, "Engine", make)
    monkeypatch.setattr(engine_process.EngineLoop, "run", serve)
    monkeypatch.setattr(EngineEnd, "send", lambda *_: None)
    monkeypatch.setattr(os, "_exit", end)
    fds = [StagingArena.create_file("exports"), StagingArena.create_file("imports")]
    config = make_engine(tiny_model("llama")).config
    with pytest.raises(_EndedError):
        engine_process.run(EngineEnd(theirs), Start(config, "test", "warning", *fds))
    assert ends == [(0 if problem is None else 1, True)]
