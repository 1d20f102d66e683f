"""A decode pod's part in a request's life: it takes requests from gateways, orders their KV and decodes them."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from baton_common.peer_refusals import MessageRefused
from baton_engine.sequence import FinishReason, Request
from baton_proto import serving_pb2 as pb
from baton_proto.serving_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from baton_worker.convert import (
    NOT_FINITE_MESSAGE,
    delta_to_wire,
    failure_delta,
    request_from_wire,
)
from baton_worker.engine_client import EngineClient
from baton_worker.intake import Intake, conclude
from baton_worker.messages import Abort, Add, Output
from baton_worker.request_metrics import RequestMetrics
from baton_worker.request_span import begin_span
from baton_worker.wire_checks import (
    MOST_OPEN,
    MOST_OPEN_TOKENS,
    MOST_UNREAD,
    check_peers,
    check_request,
    check_submit,
)

from .handovers import Handovers
from .live_requests import LiveRequest, LiveRequests
from .settings import DecodeSettings
from .stream import GatewayStream

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from baton_common.tracing import Tracing

_RELINK_S = 1.0
_SHUTTING_DOWN = "the decode pod is shutting down"


class DecodeService(DecodeServicer):
    """Serves gateways: owns their streams, passes their requests to the engine, and sends them the engine's tokens."""

    def __init__(
        self,
        settings: DecodeSettings,
        engine: EngineClient,
        epoch: int,
        metrics: RequestMetrics,
        tracing: "Tracing | None" = None,
    ) -> None:
        self.draining = False
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._tracing = tracing
        self._intake = Intake(engine, settings.peer_refusals)
        self._ids = itertools.count(1)
        self._streams: set[GatewayStream] = set()
        self._requests = LiveRequests()
        self._handovers = Handovers(settings, engine, epoch, metrics, self._requests)
        self.events = self._handovers.events
        self._linking = asyncio.create_task(self._keep_links())

    def add_to(self, server: grpc.aio.Server) -> None:
        add_DecodeServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    @property
    def num_active(self) -> int:
        return len(self._requests) + sum(stream.unsent for stream in self._streams)

    @property
    def num_tickets(self) -> int:
        return self._handovers.num_tickets

    @property
    def handed_over_tokens(self) -> int:
        return self._handovers.tokens

    @property
    def exposed_handover_s(self) -> float:
        return self._handovers.exposed_s

    def hand_back(self) -> None:
        for request in list(self._requests):
            self._cancel(request.id)
            request.fail(pb.Failure.CODE_UNAVAILABLE, _SHUTTING_DOWN)

    async def stop(self) -> None:
        self._linking.cancel()
        await self._handovers.stop()

    # Gateways

    async def Serve(self, request_iterator: AsyncIterator[pb.GatewayMessage], context: Any) -> AsyncIterator[Any]:
        stream = GatewayStream()
        self._streams.add(stream)
        act = partial(self._act_on, stream)
        reader = asyncio.create_task(self._intake.read(request_iterator, act, context.peer()))
        sending = asyncio.create_task(stream.next())
        try:
            while True:
                await asyncio.wait([reader, sending], return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    await conclude(reader, context)
                    return
                yield sending.result()
                sending = asyncio.create_task(stream.next())
        finally:
            reader.cancel()
            sending.cancel()
            self._streams.remove(stream)
            for id in list(stream.requests.values()):
                self._cancel(id)

    def _act_on(self, stream: GatewayStream, message: pb.GatewayMessage) -> None:
        """Act on a message. Raises MessageRefused."""
        if stream.num_unread > MOST_UNREAD:
            raise MessageRefused("unread", "step", "the peer does not read the answers")
        match message.WhichOneof("kind"):
            case "submit":
                self._submit(message.submit, stream)
            case "peers":
                check_peers(message.peers)
                stream.peers = list(message.peers.prefill_addresses)
                self._link_to_peers()
                if not all(map(self._handovers.may_link, stream.peers)):
                    raise MessageRefused("address", "prefill_addresses", "an address is not in --prefill-networks")
            case "cancel":
                id = stream.requests.get(message.cancel.handle)
                if id is not None and message.cancel.HasField("choice"):
                    self._cancel_choice(id, message.cancel.choice)
                elif id is not None:
                    self._cancel(id)
            case _:
                raise MessageRefused("kind", "kind", "this version does not act on such a message")

    def _submit(self, submit: pb.Submit, stream: GatewayStream) -> None:
        """Start a request, or tell the gateway that it has failed. Raises MessageRefused."""
        if submit.handle in stream.requests:
            # There is no answer, because an answer would end the running request with this handle.
            raise MessageRefused("repeated", "handle", "a request with this handle is running")
        if self.draining:
            stream.put([failure_delta(submit.handle, pb.Failure.CODE_UNAVAILABLE, _SHUTTING_DOWN)])
            return
        try:
            check_submit(submit, self._engine.ready)
            request = self._request(submit, stream)
        except MessageRefused as refusal:
            code = pb.Failure.CODE_UNAVAILABLE if refusal.reason == "capacity" else pb.Failure.CODE_INVALID
            stream.put([failure_delta(submit.handle, code, refusal.problem, refusal.field)])
            raise
        known = len(request.prompt) + len(request.output)
        named = submit.prefill_addresses if known > self._settings.local_prefill_tokens else []
        prefills = [address for address in named if self._handovers.may_link(address)]
        request.imports_kv = bool(prefills)
        span = begin_span(self._tracing, "decode", submit.request_id, submit.traceparent)
        times = self._metrics.begin(known, span.trace_id if span is not None else None)
        choices = set(range(request.choice, request.choice + request.sampling.n))
        self._requests.add(LiveRequest(request.id, submit, stream, times, span, choices, set(), prefills))
        self._engine.send(Add(request))

    def _request(self, submit: pb.Submit, stream: GatewayStream) -> Request:
        """Return the engine's request for a gateway's message. Raises MessageRefused."""
        known = len(submit.prompt_token_ids) + len(submit.continuation.token_ids)
        if len(stream.requests) >= MOST_OPEN or stream.open_tokens + known > MOST_OPEN_TOKENS:
            raise MessageRefused("capacity", "submit", "too many requests are running on this connection")
        request = request_from_wire(next(self._ids), submit)
        check_request(request, self._engine.ready)
        return request

    def _cancel_choice(self, id: int, choice: int) -> None:
        request = self._requests.get(id)
        if request is None or choice not in request.choices:
            return
        # Until the KV has arrived, all choices are one sequence in the engine, and none can be ended alone.
        if request.awaits_kv:
            request.cancelled.add(choice)
        else:
            self._engine.send(Abort(id, choice))
            self._requests.note_finish(request, choice, FinishReason.STOP)

    def _cancel(self, id: int) -> None:
        """Free the resources of a request here and on its prefill pod."""
        request = self._requests.get(id)
        if request is not None:
            self._engine.send(Abort(id))
            self._requests.end(request, "abort")

    # Prefill pods

    def _link_to_peers(self) -> None:
        for stream in self._streams:
            for address in filter(self._handovers.may_link, stream.peers):
                self._handovers.link_to(address)

    async def _keep_links(self) -> None:
        while True:
            await asyncio.sleep(_RELINK_S)
            self._link_to_peers()

    # Engine

    def take(self, output: Output) -> None:
        for rejected in output.rejections:
            request = self._requests.get(rejected.id)
            if request is not None:
                request.fail(pb.Failure.CODE_INVALID, rejected.message, rejected.param)
                self._requests.end(request, "error")
        for id in output.broken:
            request = self._requests.get(id)
            if request is not None:
                extra = {"event": "not_finite", "request_id": request.submit.request_id}
                log.error(NOT_FINITE_MESSAGE, extra=extra)
                request.fail(pb.Failure.CODE_NOT_FINITE, NOT_FINITE_MESSAGE)
                self._requests.end(request, "error")
        self._handovers.take(output)
        batches: dict[GatewayStream, list[pb.Delta]] = {}
        for delta in output.deltas:
            request = self._requests.get(delta.id)
            if request is not None and delta.choice in request.cancelled:
                self._cancel_choice(request.id, delta.choice)
            elif request is not None and delta.choice in request.choices:
                wire = delta_to_wire(delta, request.submit.handle, disaggregated=False)
                request.measure(wire, "decode")
                batches.setdefault(request.stream, []).append(wire)
                self._requests.note_finish(request, delta.choice, delta.finish_reason)
        for stream, batch in batches.items():
            stream.put(batch)
