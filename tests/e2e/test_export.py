"""A prefill pod keeps exported KV until its ticket is acknowledged, cancelled or expired, or its link is lost."""

import asyncio

import pytest

from baton_proto import handover_pb2 as kv
from tests.conftest import MakeModel

from .conftest import StartWorker
from .decode_side import decode_side
from .pod import is_idle
from .prompts import make_prompt
from .workers import Worker

LONG_LEASE_MS = 60_000
NUM_BLOCKS = 10  # of a prompt of 150 tokens


async def test_an_acknowledgement_frees_it(prefill: Worker) -> None:
    async with decode_side(prefill) as side:
        await side.order(1, make_prompt(150, seed=200), LONG_LEASE_MS)
        assert (await side.receive()).first_tokens.ticket_id == 1
        await side.tokens(1, 150)
        held = await prefill.until(lambda load: load.blocks_held)
        assert (held.blocks_held, held.tickets, held.running) == (NUM_BLOCKS, 1, 0)
        await side.send(ack=kv.TicketRef(ticket_id=1))
        await prefill.idle()


async def test_a_cancel_frees_it(prefill: Worker) -> None:
    async with decode_side(prefill) as side:
        await side.order(1, make_prompt(150, seed=201), LONG_LEASE_MS)
        await side.receive()
        await side.send(cancel=kv.TicketRef(ticket_id=1))
        await prefill.idle()


async def test_the_end_of_its_lease_frees_it(prefill: Worker) -> None:
    async with decode_side(prefill) as side:
        await side.order(1, make_prompt(150, seed=202), lease_ms=2_000)
        assert (await side.receive()).first_tokens.ticket_id == 1
        assert not is_idle(await prefill.load())
        assert (await side.receive()).failed.ticket_id == 1
        assert (await prefill.idle()).handover_events["lease_expired"]
        await side.send(ack=kv.TicketRef(ticket_id=1))
        await side.order(2, make_prompt(20, seed=203), LONG_LEASE_MS)
        assert (await side.receive()).first_tokens.ticket_id == 2


async def test_a_renewal_keeps_it(prefill: Worker) -> None:
    async with decode_side(prefill) as side:
        await side.order(1, make_prompt(150, seed=204), lease_ms=1_500)
        await side.order(2, make_prompt(150, seed=205), lease_ms=1_500)
        for _ in range(2):
            await side.receive()
        await side.send(renew=kv.Renew(ticket_ids=[2, 99], lease_ms=LONG_LEASE_MS))
        assert (await side.receive()).failed.ticket_id == 1
        await prefill.until(lambda load: (load.tickets, load.blocks_held) == (1, NUM_BLOCKS))
    await prefill.idle()


async def test_a_lost_link_frees_it_while_it_is_computed(prefill: Worker) -> None:
    async with decode_side(prefill) as side:
        for ticket_id in range(1, 9):
            await side.order(ticket_id, make_prompt(1_000, seed=206 + ticket_id), LONG_LEASE_MS)
        await prefill.until(lambda load: load.queued_prefill_tokens)
    await prefill.idle()


async def test_an_unread_link_does_not_stop_others(tiny_model: MakeModel, start_worker: StartWorker) -> None:
    """One decode pod orders much and reads nothing: its pieces leave staging slots to the others."""
    wide = tiny_model("llama", num_key_value_heads=4, head_dim=128, max_position_embeddings=2048)
    prefill = await start_worker("prefill", wide, max_num_batched_tokens=512)
    async with decode_side(prefill) as deaf, decode_side(prefill) as side:
        for ticket_id in range(1, 4):
            await deaf.order(ticket_id, make_prompt(1_600, seed=300 + ticket_id), lease_ms=LONG_LEASE_MS)
        for _ in range(3):
            assert (await deaf.receive()).WhichOneof("kind") == "first_tokens"
        await side.order(1, make_prompt(150, seed=299), LONG_LEASE_MS)
        await side.tokens(1, 150)
        await side.send(ack=kv.TicketRef(ticket_id=1))
        for ticket_id in range(1, 4):
            await deaf.send(cancel=kv.TicketRef(ticket_id=ticket_id))
        await prefill.idle()


@pytest.mark.parametrize("bad", ["empty prompt", "long prompt"])
async def test_an_order_that_cannot_be_filled_fails_alone(prefill: Worker, bad: str) -> None:
    async with decode_side(prefill) as side:
        await side.order(1, [] if bad == "empty prompt" else make_prompt(3_000, seed=220), LONG_LEASE_MS)
        failed = (await side.receive()).failed
        assert (failed.ticket_id, failed.failure.param) == (1, "prompt")
        await side.order(2, make_prompt(20, seed=221), LONG_LEASE_MS)
        first, _ = await asyncio.gather(side.receive(), side.tokens(2, 20))
        assert first.first_tokens.ticket_id == 2
    await prefill.idle()


async def test_an_idle_link_stays_up(prefill: Worker) -> None:
    """Decode pods ping their links while nothing is sent; gRPC servers take that for an attack unless told not to."""
    pings = [
        ("grpc.keepalive_time_ms", 1_100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with decode_side(prefill, pings) as side:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(side.receive(), 6)
