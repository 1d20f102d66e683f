"""KV that fails a check is never decoded on: the decode pod computes the prompt itself, and the answer is right."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from baton_kv.pieces import checksum
from baton_proto import handover_pb2 as kv
from tests.models import reference_choices

from .conftest import LOOP, StartWorker
from .decode_client import DecodeClient
from .prompts import make_prompt
from .relay import relay_to
from .workers import Worker


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def impatient(llama: Path) -> AsyncIterator[Worker]:
    """A decode pod with short leases."""
    worker = await Worker.start("decode", llama, lease_seconds=1, max_num_batched_tokens=48, log_level="debug")
    yield worker
    await worker.kill()


def wrong_epoch(piece: kv.KvPiece) -> None:
    piece.epoch ^= 1


def unknown_ticket(piece: kv.KvPiece) -> None:
    piece.ticket_id += 1_000_000


def wrong_generation(piece: kv.KvPiece) -> None:
    piece.generation += 1


def blocks_beyond_the_order(piece: kv.KvPiece) -> None:
    piece.first_block += 1_000


def blocks_before_the_order(piece: kv.KvPiece) -> None:
    """What the decode pod has already, which others may be using."""
    piece.first_block = 0


def more_blocks_than_payload(piece: kv.KvPiece) -> None:
    piece.num_blocks += 1


def part_of_the_layers(piece: kv.KvPiece) -> None:
    piece.num_layers -= 1


def damaged_payload(piece: kv.KvPiece) -> None:
    middle = len(piece.payload) // 2
    piece.payload = piece.payload[:middle] + bytes([piece.payload[middle] ^ 1]) + piece.payload[middle + 1 :]


def cut_payload(piece: kv.KvPiece) -> None:
    piece.payload = piece.payload[:-4]
    piece.checksum = checksum(piece.payload)


DAMAGES: dict[Callable[[kv.KvPiece], None], str] = {
    wrong_epoch: "epoch",
    unknown_ticket: "ticket",
    wrong_generation: "generation",
    blocks_beyond_the_order: "range",
    blocks_before_the_order: "range",
    more_blocks_than_payload: "range",
    part_of_the_layers: "range",
    damaged_payload: "checksum",
    cut_payload: "range",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("which", ["first", "last"])
async def test_a_refused_piece(
    llama: Path, prefill: Worker, impatient: Worker, damage: Callable[[kv.KvPiece], None], which: str
) -> None:
    prompt = make_prompt(150, seed=50 + 2 * list(DAMAGES).index(damage) + (which == "last"))
    last_block = len(prompt) // 16

    def change(piece: kv.KvPiece) -> list[kv.KvPiece]:
        if piece.first_block == 1 if which == "first" else piece.first_block + piece.num_blocks > last_block:
            damage(piece)
        return [piece]

    logged = len(impatient.process.lines)
    async with DecodeClient(impatient) as client:
        # One block is known on the decode pod already.
        await client.ask(prompt[:17], max_tokens=1)
        async with relay_to(prefill, change) as relay:
            answer = await client.ask(prompt, relay.address)
            refusal = await impatient.process.wrote(lambda line: line.get("event") == "piece_refused", 10, logged)
    assert refusal["reason"] == DAMAGES[damage]
    assert answer.only == reference_choices(llama, prompt, answer.only)
    await asyncio.gather(impatient.idle(), prefill.idle())


async def test_a_piece_that_comes_twice(llama: Path, prefill: Worker, decode: Worker) -> None:
    prompt = make_prompt(150, seed=40)
    async with DecodeClient(decode) as client, relay_to(prefill, lambda piece: [piece, piece]) as relay:
        answer = await client.ask(prompt, relay.address)
    assert answer.only == reference_choices(llama, prompt, answer.only)
    await asyncio.gather(decode.idle(), prefill.idle())


async def test_pieces_that_never_come(llama: Path, prefill: Worker, impatient: Worker) -> None:
    prompt = make_prompt(150, seed=41)
    async with DecodeClient(impatient) as client, relay_to(prefill, lambda piece: []) as relay:
        answer = await client.ask(prompt, relay.address)
    assert answer.only == reference_choices(llama, prompt, answer.only)
    await asyncio.gather(impatient.idle(), prefill.idle())


async def test_a_piece_that_comes_when_its_blocks_are_another_request_s(
    llama: Path, prefill: Worker, start_worker: StartWorker
) -> None:
    """The pool holds one prompt, so the second request gets the very blocks for which the first one's KV is late."""
    small = await start_worker("decode", num_blocks=16, max_model_len=256, log_level="debug")
    first, second = make_prompt(180, seed=42), make_prompt(180, seed=43)
    async with DecodeClient(small) as client, relay_to(prefill) as relay:
        relay.gate.clear()
        cancelled = await client.submit(first, relay.address)
        await cancelled.until(lambda answer: answer.only)
        await asyncio.wait_for(relay.held.wait(), 10)
        await client.cancel(cancelled)
        await small.idle()
        answer = await client.submit(second, relay.address)
        await answer.until(lambda answer: answer.only)
        relay.gate.set()
        await answer.finished()
    assert answer.only == reference_choices(llama, second, answer.only)
    assert answer.prompt is not None
    assert answer.prompt.disaggregated
    assert (await small.process.logged("piece_refused", 10))["reason"] == "ticket"
    await asyncio.gather(small.idle(), prefill.idle())
