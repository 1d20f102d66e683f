"""A decode pod's service, with an engine that only records its commands."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton_decode.service import DecodeService
from baton_decode.settings import DecodeSettings
from baton_engine.delta import Reservation
from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb
from baton_worker.messages import Abort, Add, CancelImport, ImportTokens, Output, RestartImport
from baton_worker.request_metrics import RequestMetrics
from tests.listening_engine import ListeningEngine

NOBODY = "127.0.0.1:1"
CONTEXT = SimpleNamespace(peer=lambda: "test")


@pytest.mark.processes
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


async def serve_messages(service: DecodeService, *messages: pb.GatewayMessage) -> list[pb.Delta]:
    """Send messages on a stream of their own; return what comes back until nothing more does."""

    async def sent() -> AsyncIterator[pb.GatewayMessage]:
        for message in messages:
            yield message
        await asyncio.Event().wait()

    deltas: list[pb.Delta] = []

    async def serve() -> None:
        async for message in service.Serve(sent(), CONTEXT):
            deltas.extend(message.step.deltas)

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(serve(), 0.3)
    return deltas


def order(handle: int, *prefills: str, **sampling: Any) -> pb.GatewayMessage:
    params = pb.SamplingParams(**{"max_tokens": 5, "n": 1, "top_p": 1, "repetition_penalty": 1, **sampling})
    submit = pb.Submit(handle=handle, prompt_token_ids=[1] * 10, sampling=params, prefill_addresses=prefills)
    return pb.GatewayMessage(submit=submit)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", (1 << 20)),
        ("presence_penalty", float("nan")),
        ("logprobs", (1 << 32) - 1),
        ("logit_bias", {1: float("inf")}),
    ],
)
async def test_a_request_that_cannot_run_never_reaches_the_engine(field: str, value: Any) -> None:
    engine: Any = ListeningEngine()
    settings = DecodeSettings(model=Path())
    service = DecodeService(settings, engine, epoch=1, metrics=RequestMetrics())
    [delta] = await serve_messages(service, order(1, **{field: value}))
    assert (delta.failure.code, delta.failure.param) == (pb.Failure.CODE_INVALID, field)
    assert not engine.heard
    assert settings.peer_refusals.messages["request"] == 1
    await service.stop()


async def test_a_handle_that_runs_is_not_given_to_another_request() -> None:
    """Both were lost count of: when the stream ended, the engine still held the first."""
    engine: Any = ListeningEngine()
    service = DecodeService(DecodeSettings(model=Path()), engine, epoch=1, metrics=RequestMetrics())
    assert not await serve_messages(service, order(1), order(1))
    assert [command.request.id for command in engine.heard if isinstance(command, Add)] == [1]
    assert Abort(1) in engine.heard
    assert service.num_active == 0
    await service.stop()


@pytest.mark.parametrize(
    "address", ["192.0.2.1:50051", "example.com:80", "unix:/run/x:1", "127.0.0.1:99999", "127.0.0.1", "[fe80::1]:1"]
)
async def test_addresses_where_no_prefill_pod_can_be_are_never_linked_to(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked: list[str] = []
    monkeypatch.setattr("baton_decode.links.PrefillLink", lambda address, *_: linked.append(address))
    engine: Any = ListeningEngine()
    service = DecodeService(DecodeSettings(model=Path()), engine, epoch=1, metrics=RequestMetrics())
    await serve_messages(service, pb.GatewayMessage(peers=pb.Peers(prefill_addresses=[address])), order(1, address))
    assert not linked
    assert not any(command.request.imports_kv for command in engine.heard if isinstance(command, Add))
    await service.stop()


def first_tokens(**fields: Any) -> kv.FirstTokens:
    return kv.FirstTokens(ticket_id=1, deltas=[pb.Delta(**{"token_ids": [3], **fields})])


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [512]},
        {"token_ids": [3, 4]},
        {"choice": 1},
        {"offset": 1},
        {"finish_reason": 99},
        {"prompt": pb.PromptInfo(queued_seconds=float("nan"))},
        {"prompt": pb.PromptInfo(prefill_seconds=float("inf"))},
        {"prompt": pb.PromptInfo(queued_seconds=1e300)},
        {"finish_reason": pb.FINISH_REASON_ERROR},
        {"logprobs": [pb.TokenLogprobs(top_token_ids=[1] * 9, top_logprobs=[0.0] * 9)]},
    ],
    ids=lambda fields: "-".join(fields),
)
async def test_first_tokens_are_checked_and_only_their_own_pod_may_send_them(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token outside of the vocabulary ended the engine."""
    links: list[Any] = []

    def make_link(address: str, *_: Any) -> Any:
        links.append(SimpleNamespace(address=address, send=lambda _: None, pair=None, close=lambda: asyncio.sleep(0)))
        return links[-1]

    monkeypatch.setattr("baton_decode.links.PrefillLink", make_link)
    engine: Any = ListeningEngine()
    service = DecodeService(DecodeSettings(model=Path()), engine, epoch=1, metrics=RequestMetrics())
    serving = asyncio.create_task(serve_messages(service, order(1, NOBODY)))
    await engine.until(lambda command: isinstance(command, Add))
    service.take(Output(reservations=[Reservation(1, 0, 10, 1, 0)]))
    handovers = service._handovers
    handovers.first_tokens(SimpleNamespace(address="other"), first_tokens())  # type: ignore[arg-type]
    handovers.ticket_failed(SimpleNamespace(address="other"), kv.TicketFailed(ticket_id=1))  # type: ignore[arg-type]
    assert service.num_tickets == 1
    assert not any(isinstance(command, ImportTokens | CancelImport) for command in engine.heard)
    handovers.first_tokens(links[0], first_tokens(**fields))
    assert not any(isinstance(command, ImportTokens) for command in engine.heard)
    assert CancelImport(1) in engine.heard
    await serving
    await service.stop()
