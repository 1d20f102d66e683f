"""The engine in a process of its own, through the RPC process's EngineClient."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from baton_common.block_hash import block_keys
from baton_common.extent import Extent
from baton_engine.config import ConfigError
from baton_engine.fingerprint import layout_fingerprint
from baton_worker import engine_client
from baton_worker.engine_client import EngineDied
from baton_worker.messages import Abort, CancelImport, FreeSlot, ImportPiece, ImportTokens
from tests.conftest import MakeModel
from tests.engine.harness import Transcript, finish, make_engine, make_prompt, make_request
from tests.models import reference_choices, reference_greedy

from .listener import Listener, start_engine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.processes]

ids = itertools.count(1)


@pytest.fixture(scope="module")
def folder(tiny_model: MakeModel) -> Path:
    return tiny_model("llama")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_prefill(folder: Path) -> AsyncIterator[Listener]:
    listener = Listener(await start_engine(folder, max_num_batched_tokens=24))
    yield listener
    await listener.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_decode(folder: Path) -> AsyncIterator[Listener]:
    listener = Listener(await start_engine(folder))
    yield listener
    await listener.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def prefill(shared_prefill: Listener) -> AsyncIterator[Listener]:
    """An engine process; after each test it must hold nothing."""
    shared_prefill.pieces.clear()
    yield shared_prefill
    await shared_prefill.idle()


@pytest_asyncio.fixture(loop_scope="module")
async def decode(shared_decode: Listener) -> AsyncIterator[Listener]:
    """Another one."""
    shared_decode.freed_slots.clear()
    yield shared_decode
    await shared_decode.idle()


async def carry(prefill: Listener, decode: Listener, id: int) -> None:
    """Put the next exported piece of a request into the decode engine, as its RPC process does."""
    piece = next(piece for piece in prefill.pieces if piece.id == id)
    prefill.pieces.remove(piece)
    payload = prefill.bytes_of(piece)
    prefill.client.send(FreeSlot(piece.slot))
    slot = decode.client.import_slots.get_nowait()
    decode.client.imports.slot(slot, len(payload))[:] = payload
    generation = decode.reservations[id].generation
    freed = len(decode.freed_slots)
    decode.client.send(ImportPiece(id, generation, piece.extent, slot))
    await decode.until(lambda: len(decode.freed_slots) > freed)
    decode.client.import_slots.put_nowait(decode.freed_slots[-1])


async def test_it_says_what_it_is(decode: Listener, folder: Path) -> None:
    ready, engine = decode.client.ready, make_engine(folder, num_blocks=64)
    assert ready.fingerprint == layout_fingerprint(engine.fingerprint_facts(), folder)
    assert (ready.max_model_len, ready.vocab_size, ready.block_size, ready.num_blocks) == (512, 512, 16, 64)
    assert (ready.layout.num_layers, ready.layout.num_heads) == (2, 2)
    # Keys and values of 16 float32 each.
    assert ready.layout.layer_bytes == 2 * 2 * 16 * 4
    assert ready.slot_bytes % ready.layout.token_bytes == 0


async def test_it_generates_the_tokens_of_the_reference(decode: Listener, folder: Path) -> None:
    prompts = {next(ids): make_prompt(5 + 20 * index, seed=index) for index in range(5)}
    for id, prompt in prompts.items():
        decode.add(make_request(id, prompt, 20))
    await decode.ended(*prompts)
    for id, prompt in prompts.items():
        tokens = decode.transcript.tokens[id, 0]
        assert len(tokens) == 20
        assert tokens == reference_choices(folder, prompt, tokens)


async def test_it_tells_what_its_prefix_cache_gains_and_loses(decode: Listener) -> None:
    prompts = [make_prompt(200, seed=60 + index) for index in range(8)]
    for prompt in prompts:
        id = next(ids)
        decode.add(make_request(id, prompt, 1))
        await decode.ended(id)
    await decode.idle()
    # 64 blocks have room for five such prompts: the first ones are gone.
    first, last = set(block_keys(prompts[0], 16)), set(block_keys(prompts[-1], 16))
    await decode.until(lambda: last <= decode.cached)
    assert not first & decode.cached
    assert decode.load is not None
    assert len(decode.cached) == decode.load.blocks_cached


async def test_a_request_that_can_never_run_is_rejected_and_harms_nobody(decode: Listener, folder: Path) -> None:
    good, bad = next(ids), next(ids)
    decode.add(make_request(good, make_prompt(9), 12))
    decode.add(make_request(bad, [5, 512], 3))
    await decode.ended(good)
    [rejection] = [rejection for rejection in decode.rejections if rejection.id == bad]
    assert rejection.param == "prompt"
    assert "512" in rejection.message
    assert decode.transcript.tokens[good, 0] == reference_greedy(folder, make_prompt(9), 12)


async def test_an_abort_frees_at_once(decode: Listener) -> None:
    id = next(ids)
    decode.add(make_request(id, make_prompt(9), 500))
    await decode.until(lambda: len(decode.transcript.tokens.get((id, 0), [])) > 3)
    decode.client.send(Abort(id))
    await decode.idle()
    assert len(decode.transcript.tokens[id, 0]) < 500


async def test_exports_hold_exactly_the_kv(prefill: Listener, folder: Path) -> None:
    id, prompt = next(ids), make_prompt(70, seed=50)
    prefill.add(make_request(id, prompt, 1, exports_from=0))
    await prefill.until(lambda: sum(piece.extent.num_tokens for piece in prefill.pieces) == 70)
    engine = make_engine(folder, max_num_batched_tokens=24)
    engine.add(make_request(id, prompt, 1, exports_from=0))
    finish(engine, Transcript())
    blocks = engine._sequences[id][0].tables[0].blocks
    for piece in prefill.pieces:
        tokens = piece.extent.tokens
        expected = torch.stack(engine.runner.cache.planes, dim=1)[:, :, blocks].flatten(2, 3)[:, :, tokens]
        got = torch.frombuffer(bytearray(prefill.bytes_of(piece)), dtype=torch.float32).view(expected.shape)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        prefill.client.send(FreeSlot(piece.slot))
    # Until they are released the blocks stay.
    assert prefill.load is not None
    assert prefill.load.blocks_held == 5
    prefill.client.send(Abort(id))


async def test_kv_goes_from_one_process_to_the_other(prefill: Listener, decode: Listener, folder: Path) -> None:
    id, prompt = next(ids), make_prompt(130, seed=51)
    decode.add(make_request(id, prompt, 20, imports_kv=True))
    await decode.until(lambda: id in decode.reservations)
    first_token = decode.reservations[id].first_token
    prefill.add(make_request(id, prompt, 20, exports_from=first_token))
    while id not in decode.imported:
        await prefill.until(lambda: any(piece.id == id for piece in prefill.pieces))
        await carry(prefill, decode, id)
    prefill.client.send(Abort(id))
    await prefill.until(lambda: (id, 0) in prefill.transcript.tokens)
    first = prefill.transcript.tokens[id, 0]
    decode.client.send(ImportTokens(id, first))
    decode.transcript.tokens[id, 0] = list(first)
    await decode.ended(id)
    assert decode.transcript.tokens[id, 0] == reference_greedy(folder, prompt, 20)


async def test_more_pieces_than_slots_wait_for_free_ones(prefill: Listener) -> None:
    requests = [next(ids) for _ in range(12)]
    for id in requests:
        prefill.add(make_request(id, make_prompt(10, seed=id), 1, exports_from=0))
    await prefill.until(lambda: all((id, 0) in prefill.transcript.tokens for id in requests))
    # The other half is for other lanes.
    slots = prefill.client.ready.num_slots // 2
    await prefill.until(lambda: len(prefill.pieces) == slots)
    await asyncio.sleep(0.2)
    assert len(prefill.pieces) == slots < len(requests)
    assert len({piece.slot for piece in prefill.pieces}) == slots
    other = next(ids)
    prefill.add(make_request(other, make_prompt(10, seed=other), 1, exports_from=0), lane=1)
    await prefill.until(lambda: prefill.pieces[-1].id == other)
    # One that waits for a slot is gone; its blocks are not packed any more.
    waiting = [id for id in requests if id not in {piece.id for piece in prefill.pieces}]
    prefill.client.send(Abort(waiting[0]))
    for read in range(len(requests)):
        await prefill.until(lambda wanted=read + 1: len(prefill.pieces) >= wanted)
        prefill.client.send(FreeSlot(prefill.pieces[read].slot))
    assert {piece.id for piece in prefill.pieces} == {*requests, other} - {waiting[0]}
    for id in (*requests, other):
        prefill.client.send(Abort(id))


async def test_a_late_piece_is_reported_and_its_slot_freed(decode: Listener, folder: Path) -> None:
    id, prompt = next(ids), make_prompt(40, seed=52)
    decode.add(make_request(id, prompt, 12, imports_kv=True))
    await decode.until(lambda: id in decode.reservations)
    reservation = decode.reservations[id]
    decode.client.send(CancelImport(id))
    extent = Extent(
        first_token=reservation.first_token, num_tokens=16, first_layer=0, num_layers=2, first_head=0, num_heads=2
    )
    size = decode.client.ready.layout.size(extent)
    decode.client.imports.slot(3, size)[:] = b"\x7f" * size
    decode.client.send(ImportPiece(id, reservation.generation, extent, 3))
    await decode.ended(id)
    assert decode.stale == [id]
    assert decode.freed_slots == [3]
    assert decode.transcript.tokens[id, 0] == reference_greedy(folder, prompt, 12)


async def test_an_export_larger_than_a_slot_comes_in_several(tiny_model: MakeModel) -> None:
    model = tiny_model("llama", num_key_value_heads=4, head_dim=128, num_hidden_layers=1, max_position_embeddings=2048)
    # A token is 4 KiB, a slot 1,024 tokens.
    listener = Listener(await start_engine(model, block_size=128, num_blocks=24, export_fraction=1, max_model_len=2048))
    assert listener.client.ready.slot_bytes == 4 << 20
    listener.add(make_request(1, make_prompt(1500), 1, exports_from=0))
    listener.add(make_request(2, make_prompt(600, seed=1), 1, exports_from=130))
    await listener.until(lambda: sum(piece.extent.num_tokens for piece in listener.pieces) == 1500 + 470)
    pieces = sorted((p.id, p.extent.first_token, p.extent.num_tokens) for p in listener.pieces)
    assert sum(count for id, _, count in pieces if id == 1) == 1500
    assert next(first for id, first, _ in pieces if id == 2) == 130
    assert sum(count for id, _, count in pieces if id == 2) == 470
    for id in (1, 2):
        listener.client.send(Abort(id))
    await listener.idle()
    await listener.stop()


async def test_a_model_that_cannot_be_served_is_a_config_error(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model folder"):
        await start_engine(tmp_path)
    with pytest.raises(ConfigError, match="--max-model-len 1000000"):
        await start_engine(folder, max_model_len=1_000_000)


async def test_a_killed_engine_is_noticed(folder: Path) -> None:
    listener = Listener(await start_engine(folder))
    listener.add(make_request(1, make_prompt(9), 400))
    await listener.until(lambda: (1, 0) in listener.transcript.tokens)
    listener.client._process.kill()
    with pytest.raises(EngineDied, match="status -9"):
        await listener.ended(1)
    await listener.client.stop()


async def test_a_stopped_engine_ends_cleanly_in_the_middle_of_work(folder: Path) -> None:
    listener = Listener(await start_engine(folder))
    listener.add(make_request(1, make_prompt(9), 400))
    await listener.until(lambda: (1, 0) in listener.transcript.tokens)
    await asyncio.wait_for(listener.stop(), 10)
    assert listener.client._process.returncode == 0


async def test_an_engine_that_does_not_end_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "_END_S", 0.2)
    client = await start_engine(folder)
    client._process.send_signal(signal.SIGSTOP)
    await asyncio.wait_for(client.stop(), 10)
    assert client._process.returncode == -signal.SIGKILL
