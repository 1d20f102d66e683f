"""A prefill pod's service, with an engine that only records its commands: connections do not affect each other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton_prefill.service import PrefillService
from baton_prefill.settings import PrefillSettings
from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb
from baton_worker.intake import MOST_VIOLATIONS
from baton_worker.messages import Abort, Add, Output, Rejected, UsePair
from baton_worker.request_metrics import RequestMetrics
from tests.listening_engine import ListeningEngine


class Ended(Exception):
    pass


class Context:
    code: grpc.StatusCode | None = None

    def peer(self) -> str:
        return "test"

    async def abort(self, code: grpc.StatusCode, _details: str) -> None:
        self.code = code
        raise Ended


class Side:
    """A decode pod's stream."""

    def __init__(self, service: PrefillService, gpu_piece_bytes: int = 0) -> None:
        self.context = Context()
        self.said: list[kv.PrefillToDecode] = []
        self._sent: asyncio.Queue[kv.DecodeToPrefill] = asyncio.Queue()
        hello = kv.Hello(epoch=1, fingerprint="f", gpu_piece_bytes=gpu_piece_bytes)
        self.send(hello=hello)
        self.task = asyncio.create_task(self._serve(service))

    def send(self, **kind: Any) -> None:
        self._sent.put_nowait(kv.DecodeToPrefill(**kind))

    def order(self, id: int, **fields: Any) -> None:
        sampling = pb.SamplingParams(max_tokens=5, n=1, top_p=1, repetition_penalty=1)
        ticket = {"prompt_token_ids": [1] * 10, "sampling": sampling, "lease_ms": 60_000, **fields}
        self.send(ticket=kv.Ticket(ticket_id=id, **ticket))

    async def _serve(self, service: PrefillService) -> None:
        async def messages() -> AsyncIterator[kv.DecodeToPrefill]:
            while True:
                yield await self._sent.get()

        try:
            async for message in service.Handover(messages(), self.context):
                self.said.append(message)
        except Ended:
            pass


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[PrefillService, ListeningEngine]]:
    engine: Any = ListeningEngine()
    settings = PrefillSettings(model=Path(), kv_port=None)
    yield PrefillService(settings, engine, epoch=1, metrics=RequestMetrics()), engine


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_ticket_id_that_is_open_is_refused_and_the_pod_lives() -> None:
    async with serving() as (service, engine):
        side = Side(service)
        side.order(7)
        side.order(7)
        await settle()
        added = [command for command in engine.heard if isinstance(command, Add)]
        assert len(added) == 1
        for command in added:
            service.take(Output(rejections=[Rejected(command.request.id, "prompt", "no")]))
        assert service.num_tickets == 0
        side.task.cancel()
        await asyncio.gather(side.task, return_exceptions=True)


async def test_a_connection_ends_only_its_own_tickets() -> None:
    async with serving() as (service, engine):
        ours, theirs = Side(service), Side(service)
        ours.order(7)
        await settle()
        theirs.send(cancel=kv.TicketRef(ticket_id=7))
        theirs.send(ack=kv.TicketRef(ticket_id=7))
        await settle()
        assert service.num_tickets == 1
        assert not any(isinstance(command, Abort) for command in engine.heard)
        for side in (ours, theirs):
            side.task.cancel()
        await asyncio.gather(ours.task, theirs.task, return_exceptions=True)
        assert service.num_tickets == 0


@pytest.mark.parametrize(
    "fields",
    [{"first_token": 10}, {"lease_ms": (1 << 32) - 1}, {"request_id": "x" * 5_000}],
    ids=lambda f: next(iter(f)),
)
async def test_a_field_out_of_range_is_named_and_repeated_violations_end_the_stream(fields: dict[str, Any]) -> None:
    async with serving() as (service, engine):
        broken, sound = Side(service), Side(service)
        for id in range(MOST_VIOLATIONS):
            broken.order(id, **fields)
        sound.order(1)
        await asyncio.wait_for(broken.task, 5)
        assert broken.context.code == grpc.StatusCode.INVALID_ARGUMENT
        failures = [message.failed.failure for message in broken.said if message.HasField("failed")]
        assert {failure.param for failure in failures} <= set(fields)
        assert sum(isinstance(command, Add) for command in engine.heard) == 1
        assert not sound.task.done()
        assert service.num_tickets == 1
        sound.task.cancel()
        await asyncio.gather(sound.task, return_exceptions=True)


async def test_a_pair_that_nobody_opened_is_not_used() -> None:
    async with serving() as (service, engine):
        side = Side(service)
        for _ in range(2):
            side.send(gpu_pair=kv.GpuPair(up=True))
        await settle()
        assert not any(isinstance(command, UsePair) for command in engine.heard)
        side.task.cancel()
        await asyncio.gather(side.task, return_exceptions=True)
