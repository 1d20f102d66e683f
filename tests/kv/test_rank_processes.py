"""An engine that two processes divide: its KV leaves and comes in whole, and a rank that ends or hangs ends it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from baton_worker.engine_client import EngineDied
from baton_worker.messages import Abort, FreeSlot, ImportPiece, ImportTokens
from tests.conftest import MakeModel
from tests.engine.harness import make_prompt, make_request
from tests.models import is_greedy

from .listener import Listener, start_engine

pytestmark = pytest.mark.processes


@asynccontextmanager
async def two_processes(folder: Path, **settings: int) -> AsyncIterator[Listener]:
    """An engine that two processes divide as the settings say, which computes anew what it has computed before.

    It is no fixture, because capfd gets only the output of processes that a test itself has started.
    """
    listener = Listener(await start_engine(folder, **settings, enable_prefix_caching=False))
    try:
        yield listener
    finally:
        await listener.stop()


async def end_of(listener: Listener, sent: signal.Signals) -> float:
    """Send a signal to the other rank while the engine decodes. Return the seconds until the engine has ended."""
    engine = psutil.Process(listener.client._process.pid)
    [rank] = engine.children()
    listener.add(make_request(2, make_prompt(20), 480))
    await listener.until(lambda: len(listener.transcript.tokens.get((2, 0), [])) > 2)
    os.kill(rank.pid, sent)
    began = time.monotonic()
    with pytest.raises(EngineDied):
        await listener.ended(2)
    seconds = time.monotonic() - began
    _, alive = await asyncio.to_thread(psutil.wait_procs, [engine, rank], timeout=5)
    assert not alive
    return seconds


@pytest.mark.parametrize(
    ("settings", "name"), [({"tensor_parallel": 2}, "rank 1 of 2"), ({"pipeline_parallel": 2}, "stage 1 of 2")]
)
async def test_kv_leaves_and_comes_in_whole_until_a_rank_is_killed(
    tiny_model: MakeModel, capfd: pytest.CaptureFixture[str], settings: dict[str, int], name: str
) -> None:
    folder = tiny_model("llama")
    async with two_processes(folder, **settings) as listener:
        client, prompt = listener.client, make_prompt(90)
        # The same KV layout as an engine of one rank has.
        assert (client.ready.layout.num_heads, client.ready.layout.layer_bytes) == (2, 2 * 2 * 16 * 4)
        listener.add(make_request(1, prompt, 1, exports_from=0))
        listener.add(make_request(3, prompt, 12, imports_kv=True))
        await listener.until(lambda: 3 in listener.reservations and (1, 0) in listener.transcript.tokens)
        first = list(listener.transcript.tokens[1, 0])
        while 3 not in listener.imported:
            await listener.until(lambda: bool(listener.pieces) or 3 in listener.imported)
            for piece in [listener.pieces.pop(0) for _ in list(listener.pieces)]:
                payload, slot = listener.bytes_of(piece), client.import_slots.get_nowait()
                assert any(payload)
                client.send(FreeSlot(piece.slot))
                client.imports.slot(slot, len(payload))[:] = payload
                client.send(ImportPiece(3, listener.reservations[3].generation, piece.extent, slot))
        client.send(Abort(1))
        client.send(ImportTokens(3, first))
        listener.transcript.tokens[3, 0] = list(first)
        await listener.ended(3)
        assert is_greedy(folder, prompt, listener.transcript.tokens[3, 0])
        await listener.idle()
        assert await end_of(listener, signal.SIGKILL) < 5
    assert f"{name} was ended by SIGKILL" in capfd.readouterr().err


async def test_a_rank_that_hangs_is_named(tiny_model: MakeModel, capfd: pytest.CaptureFixture[str]) -> None:
    async with two_processes(tiny_model("llama"), tensor_parallel=2) as listener:
        assert await end_of(listener, signal.SIGSTOP) < 5
    assert "rank 1 of 2 hangs: it sends no heartbeat" in capfd.readouterr().err
