"""gRPC between pods, with TLS or without."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from .peer_tls import PeerTls

Options = Sequence[tuple[str, Any]]


def make_server(options: Options, tls: PeerTls | None) -> grpc.aio.Server:
    """Return a server that serves nobody but peers, where there is TLS; its ports are for `bind`."""
    return grpc.aio.server(options=options, interceptors=[_PeersOnly(tls)] if tls is not None else None)


def bind(server: grpc.aio.Server, address: str, tls: PeerTls | None) -> int:
    """Open a port; return its number. Raises RuntimeError when it is taken."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials())


def open_channel(address: str, options: Options, tls: PeerTls | None) -> grpc.aio.Channel:
    """Return a channel to a pod; with TLS it shows the certificate of now, also when it connects again."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    options = [*options, ("grpc.ssl_target_name_override", tls.name)]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


def why_failed(error: grpc.aio.AioRpcError) -> str:
    """Return what to tell of a call that failed."""
    details = error.details() or error.code().name
    # All that gRPC says of a server that has refused the handshake, or was asked for none.
    if details.startswith("failed to connect") and details.endswith("Socket closed"):
        return f"{details}; do both pods have --peer-tls-cert-file and the others, or neither, and one authority?"
    return details


class _PeersOnly(grpc.aio.ServerInterceptor):
    """Refuses clients whose certificate, though of the right authority, has another name."""

    def __init__(self, tls: PeerTls) -> None:
        self._name = tls.name

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
                return make(self._guarded(behavior), handler.request_deserializer, handler.response_serializer)
        return handler

    def _guarded(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Any, context: Any) -> Any:
            await self._check(context)
            return await behavior(request, context)

        async def stream(request: Any, context: Any) -> Any:
            await self._check(context)
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return stream if inspect.isasyncgenfunction(behavior) else answer

    async def _check(self, context: Any) -> None:
        names = context.auth_context().get("peer_dns", ())
        if self._name.encode() not in names:
            message = f"the client's certificate is not for {self._name!r}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)
