"""A decode pod's service, with an engine that only listens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from baton_decode.service import DecodeService
from baton_decode.settings import DecodeSettings
from baton_engine.delta import Reservation
from baton_proto import serving_pb2 as pb
from baton_worker.messages import Abort, Add, CancelImport, Output, Ready, RestartImport
from baton_worker.request_metrics import RequestMetrics

NOBODY = "127.0.0.1:1"
CONTEXT = SimpleNamespace(peer=lambda: "test")


class ListeningEngine:
    def __init__(self) -> None:
        self.ready = Ready("f", 1024, 512, 16, 64, 1, 1, 64, 1 << 16, 4)
        self.heard: list[Any] = []
        self.send = self.heard.append

    async def drained(self) -> None:
        pass

    async def until(self, condition: Callable[[Any], bool]) -> None:
        async with asyncio.timeout(10):
            while not (self.heard and condition(self.heard[-1])):
                await asyncio.sleep(0.01)


async def test_one_choice_is_cancelled_between_two_hand_overs() -> None:
    """The engine has not forked the choices then: to abort the first would be to abort all."""
    engine: Any = ListeningEngine()
    service = DecodeService(DecodeSettings(model=Path()), engine, epoch=1, metrics=RequestMetrics())
    gateway: asyncio.Queue[pb.GatewayMessage] = asyncio.Queue()

    async def messages() -> AsyncIterator[pb.GatewayMessage]:
        while True:
            yield await gateway.get()

    async def serve() -> None:
        async for _ in service.Serve(messages(), CONTEXT):
            pass

    def submit(handle: int, *prefills: str) -> None:
        sampling = pb.SamplingParams(max_tokens=5, n=2, top_p=1, repetition_penalty=1)
        order = pb.Submit(handle=handle, prompt_token_ids=[1] * 10, sampling=sampling, prefill_addresses=prefills)
        gateway.put_nowait(pb.GatewayMessage(submit=order))

    def cancel(handle: int, choice: int) -> None:
        gateway.put_nowait(pb.GatewayMessage(cancel=pb.Cancel(handle=handle, choice=choice)))

    serving = asyncio.create_task(serve())
    submit(1, NOBODY, NOBODY)
    await engine.until(lambda command: isinstance(command, Add))
    service.take(Output(reservations=[Reservation(1, 0, 10, 1, 0)]))
    await engine.until(lambda command: isinstance(command, RestartImport))
    cancel(1, choice=0)
    submit(2)
    await engine.until(lambda command: isinstance(command, Add) and command.request.id == 2)
    assert not any(isinstance(command, Abort) for command in engine.heard)

    service.take(Output(reservations=[Reservation(1, 0, 10, 2, 0)]))
    await engine.until(lambda command: isinstance(command, CancelImport))
    cancel(1, choice=0)
    await engine.until(lambda command: command == Abort(1, 0))

    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await service.stop()
