"""gRPC between pods. TLS and a shared token are both optional, and independent of each other."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from .peer_refusals import MessageRefused, PeerRefusals
from .peer_tls import PeerTls
from .peer_token import PeerToken

Options = Sequence[tuple[str, Any]]

TOKEN_HEADER = "baton-peer-token"

# A peer's connection begins with a handshake and always carries a stream. After these times the server closes
# connections that have not finished the handshake or carry no stream.
_SERVER_LIMITS: Options = (("grpc.server_handshake_timeout_ms", 10_000), ("grpc.max_connection_idle_ms", 30_000))


def make_server(
    options: Options, tls: PeerTls | None, token: PeerToken | None = None, refusals: PeerRefusals | None = None
) -> grpc.aio.Server:
    """Return a server without open ports; `bind` opens them. With TLS or a token, it serves only peers."""
    refusals = refusals or PeerRefusals()
    interceptors: list[grpc.aio.ServerInterceptor] = [_Readable(refusals)]
    if token is not None:
        interceptors.append(_TokenRequired(token, refusals))
    if tls is not None:
        interceptors.append(_PeersOnly(tls, refusals))
    return grpc.aio.server(options=[*options, *_SERVER_LIMITS], interceptors=interceptors)


def bind(server: grpc.aio.Server, address: str, tls: PeerTls | None) -> int:
    """Open a port and return its number. Raises RuntimeError when it is taken."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials())


def open_channel(
    address: str, options: Options, tls: PeerTls | None, token: PeerToken | None = None
) -> grpc.aio.Channel:
    """Return a channel to a pod.

    With TLS the channel always shows the certificate that was current when it was opened, even when it reconnects.
    Each call shows the token that is current at the time of the call.
    """
    if tls is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        options = [*options, ("grpc.ssl_target_name_override", tls.name)]
        channel = grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)
    return channel if token is None else _TokenChannel(channel, token)


async def read_message(call: Any) -> Any:
    """Return the next message of a call that was made without an iterator of answers; grpc.aio.EOF at its end.

    Raises AioRpcError when the call has failed, and CancelledError whenever the task was cancelled: while a call waits
    for its first answer, grpc.aio itself loses a cancellation that comes just when the call fails. A task that goes on
    after such a failure would then run for ever beside the task that has replaced it.
    """
    task = asyncio.current_task()
    assert task is not None
    try:
        message = await call.read()
    except grpc.aio.AioRpcError:
        if task.cancelling():
            raise asyncio.CancelledError from None
        raise
    if task.cancelling():
        raise asyncio.CancelledError
    return message


def why_failed(error: grpc.aio.AioRpcError) -> str:
    """Return the reason why a call failed, for logs, with a hint when the settings of two pods do not match."""
    details = error.details() or error.code().name
    # gRPC says no more when the server refused the TLS handshake, or when only one side speaks TLS.
    if details.startswith("failed to connect") and details.endswith("Socket closed"):
        return f"{details}; do both pods or neither have --peer-tls-cert-file, and is their authority the same?"
    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        return f"{details}; do both pods have --peer-token-file, with a token in common?"
    return details


class _TokenChannel(grpc.aio.Channel):
    """A channel that adds the token to the metadata of each call.

    gRPC's own interceptors could do the same, but they pass every message of a stream through further queues.
    """

    def __init__(self, channel: grpc.aio.Channel, token: PeerToken) -> None:
        self._channel = channel
        self._token = token

    async def __aenter__(self) -> "_TokenChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._channel.__aexit__(*exc)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._showing(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._showing(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._showing(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._showing(self._channel.stream_stream(*args, **kwargs))

    def _showing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), (TOKEN_HEADER, self._token.shown)), **kwargs)

        return call


class _Readable(grpc.aio.ServerInterceptor):
    """Refuses a call whose single request message cannot be parsed; gRPC itself would log a traceback for it. Handlers
    of request streams check each message themselves."""

    def __init__(self, refusals: PeerRefusals) -> None:
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        behavior = _guarded(getattr(handler, kind), self._check)
        return make(behavior, _or_none(handler.request_deserializer), handler.response_serializer)

    async def _check(self, request: Any, context: Any) -> None:
        if request is None:
            refusal = MessageRefused("unreadable", "message", "cannot be parsed")
            self._refusals.add_message(context.peer(), refusal)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))


def _guarded(behavior: Callable[..., Any], check: Callable[[Any, Any], Awaitable[None]]) -> Callable[..., Any]:
    """Return a handler's behavior after a check of the request and its context, which aborts refused calls."""

    async def answer(request: Any, context: Any) -> Any:
        await check(request, context)
        return await behavior(request, context)

    async def stream(request: Any, context: Any) -> Any:
        await check(request, context)
        async with aclosing(behavior(request, context)) as responses:
            async for response in responses:
                yield response

    # A behavior that is not a generator either returns one response, or writes its stream to the context.
    return stream if inspect.isasyncgenfunction(behavior) else answer


def _or_none(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return None

    return read


class _TokenRequired(grpc.aio.ServerInterceptor):
    """Refuses calls that do not show one of the tokens, before it reads any of their messages."""

    def __init__(self, token: PeerToken, refusals: PeerRefusals) -> None:
        self._token = token
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == TOKEN_HEADER]
        if len(shown) == 1 and self._token.accepts(shown[0]):
            return await continuation(handler_call_details)
        reason = "the call's token is not one of this pod's tokens" if shown else "the call has no peer token"

        async def refuse(_requests: Any, context: Any) -> None:
            self._refusals.add("grpc", context.peer(), reason)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

        # On the wire, every kind of call is a stream of requests and a stream of responses.
        return grpc.stream_stream_rpc_method_handler(refuse)


class _PeersOnly(grpc.aio.ServerInterceptor):
    """Refuses clients whose certificate is from the right authority but does not have the peers' DNS name."""

    def __init__(self, tls: PeerTls, refusals: PeerRefusals) -> None:
        self._name = tls.name
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind, None)
            if behavior is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                guarded = _guarded(behavior, self._check)
                return make(guarded, handler.request_deserializer, handler.response_serializer)
        return handler

    async def _check(self, _request: Any, context: Any) -> None:
        names = context.auth_context().get("peer_dns", ())
        if self._name.encode() not in names:
            message = f"the client's certificate is not for {self._name!r}"
            self._refusals.add("grpc", context.peer(), message)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)
