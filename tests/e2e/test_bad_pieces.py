"""KV that fails a check is never decoded on: the decode pod computes the prompt itself, and the answer is right."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from baton_kv.pieces import decode, encode
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


def wrong_epoch(header: kv.PieceHeader) -> None:
    header.epoch ^= 1


def unknown_ticket(header: kv.PieceHeader) -> None:
    header.ticket_id += 1_000_000


def wrong_generation(header: kv.PieceHeader) -> None:
    header.generation += 1


def tokens_beyond_the_order(header: kv.PieceHeader) -> None:
    header.first_token += 16_000


def tokens_before_the_order(header: kv.PieceHeader) -> None:
    """What the decode pod has already, which others may be using."""
    header.first_token = 0


def more_tokens_than_payload(header: kv.PieceHeader) -> None:
    header.num_tokens += 1


def part_of_the_layers(header: kv.PieceHeader) -> None:
    header.num_layers -= 1


def other_heads(header: kv.PieceHeader) -> None:
    header.first_head += 1


def with_other_words(change: Callable[[kv.PieceHeader], None]) -> Callable[[bytes], bytes]:
    """Let a piece say something else of itself, with a checksum that is right."""

    def damage(message: bytes) -> bytes:
        piece = decode(message)
        change(piece.header)
        return encode(piece.header, piece.payload)

    damage.__name__ = change.__name__
    return damage


def damaged_payload(message: bytes) -> bytes:
    middle = len(message) // 2
    return message[:middle] + bytes([message[middle] ^ 1]) + message[middle + 1 :]


def damaged_header(message: bytes) -> bytes:
    """One bit of first_token, which makes it another block's piece."""
    piece = decode(message)
    header = piece.header.SerializeToString()
    piece.header.first_token ^= 16
    other = piece.header.SerializeToString()
    return message.replace(header, other) if len(header) == len(other) else message[:12] + b"?" + message[13:]


def cut_payload(message: bytes) -> bytes:
    piece = decode(message)
    return encode(piece.header, piece.payload[:-4])


DAMAGES: dict[Callable[[bytes], bytes], str] = {
    with_other_words(wrong_epoch): "epoch",
    with_other_words(unknown_ticket): "ticket",
    with_other_words(wrong_generation): "generation",
    with_other_words(tokens_beyond_the_order): "range",
    with_other_words(tokens_before_the_order): "range",
    with_other_words(more_tokens_than_payload): "range",
    with_other_words(part_of_the_layers): "range",
    with_other_words(other_heads): "range",
    damaged_payload: "checksum",
    damaged_header: "checksum",
    cut_payload: "range",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("which", ["first", "last"])
async def test_a_refused_piece(
    llama: Path, prefill: Worker, impatient: Worker, damage: Callable[[bytes], bytes], which: str
) -> None:
    prompt = make_prompt(150, seed=50 + 2 * list(DAMAGES).index(damage) + (which == "last"))

    def change(message: bytes) -> list[bytes]:
        tokens = decode(message).extent.tokens
        hit = tokens.start == 16 if which == "first" else tokens.stop == len(prompt)
        return [damage(message) if hit else message]

    logged = len(impatient.process.lines)
    async with DecodeClient(impatient) as client:
        # One block is known on the decode pod already.
        await client.ask(prompt[:17], max_tokens=1)
        async with relay_to(prefill, change) as relay:
            answer = await client.ask(prompt, relay.address)
            refusal = await impatient.process.wrote(lambda line: line.get("event") == "piece_refused", 10, logged)
    assert refusal["reason"] == DAMAGES[damage]
    assert (await impatient.load()).handover_events[f"refused_{DAMAGES[damage]}"]
    assert answer.only == reference_choices(llama, prompt, answer.only)
    await asyncio.gather(impatient.idle(), prefill.idle())


async def test_a_piece_that_comes_twice(llama: Path, prefill: Worker, decode: Worker) -> None:
    prompt = make_prompt(150, seed=40)
    async with DecodeClient(decode) as client, relay_to(prefill, lambda message: [message, message]) as relay:
        answer = await client.ask(prompt, relay.address)
    assert answer.only == reference_choices(llama, prompt, answer.only)
    await asyncio.gather(decode.idle(), prefill.idle())


async def test_pieces_that_never_come(llama: Path, prefill: Worker, impatient: Worker) -> None:
    prompt = make_prompt(150, seed=41)
    async with DecodeClient(impatient) as client, relay_to(prefill, lambda message: []) as relay:
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
