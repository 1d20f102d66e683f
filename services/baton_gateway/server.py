"""uvicorn, with what it lacks against slow, broken or hostile clients, and an orderly end."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton_gateway.admin import AdminServer
from baton_gateway.certificate import Certificate
from baton_gateway.errors import ApiError, bad_request
from baton_gateway.gateway import Gateway
from baton_gateway.record import SEND_BODY

MAX_HEAD_BYTES = 64 * 1024
# A refused body may still be on its way: read it that long, so that the client sees the refusal and not a reset.
LINGER_S = 5.0
TICKS_PER_LOOK = 100  # at the certificate; uvicorn ticks ten times a second


class ServerConfig(uvicorn.Config):
    """uvicorn's settings and the time limit for a request's headers, in seconds."""

    def __init__(self, gateway: Gateway, app: FastAPI, certificate: Certificate | None = None) -> None:
        super().__init__(
            app,
            http=GatewayProtocol,
            loop="uvloop",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=gateway.settings.shutdown_grace_s,
        )
        self.head_timeout_s = gateway.settings.head_timeout_s
        self.certificate = certificate

    def load(self) -> None:
        super().load()
        if self.certificate is not None:
            self.ssl = self.certificate.context


class GatewayProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on the time and size of headers, and errors in the API's form."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._begun = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_done()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.scope[SEND_BODY] = self.cycle.send  # type: ignore[literal-required]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is not None and self.cycle.more_body and not self.transport.is_closing():
            self.loop.call_later(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(bad_request(msg))

    def _await_head(self) -> None:
        if self._head_timer is None:
            assert isinstance(self.config, ServerConfig)
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(self.config.head_timeout_s, self._head_late)

    def _head_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._answering:
            self._await_head()  # a pipelined request may take as long as the one before it
        elif not self._begun:
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(ApiError(408, "The request's headers did not arrive in time.", code="request_timeout"))

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Answer what never became a request, and close."""
        self._head_done()
        body = error.body()
        if not self._answering:
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (error.status, len(body), body)
            )
        self.transport.close()


class GatewayServer(uvicorn.Server):
    """Ends on SIGTERM or SIGINT: readiness falls, new requests are refused, running ones get time to finish."""

    def __init__(self, gateway: Gateway, config: ServerConfig, admin: socket.socket) -> None:
        """admin: where operators are served meanwhile."""
        super().__init__(config)
        self._gateway = gateway
        self._admin = admin

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        admin = AdminServer(self._gateway)
        serving = asyncio.create_task(admin.serve([self._admin]))
        try:
            await super().serve(sockets)
        finally:
            # Until the last stream has ended operators see how that goes.
            admin.should_exit = True
            await serving

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._gateway.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.force_exit:
            await asyncio.sleep(self._gateway.settings.drain_delay_s)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        assert isinstance(self.config, ServerConfig)
        if self.config.certificate is not None and counter % TICKS_PER_LOOK == 0:
            self.config.certificate.follow()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while serving. Unlike uvicorn's, this does not raise them again: an orderly end is exit 0."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def listen(host: str, port: int) -> socket.socket:
    """Bind a listening socket. Raises OSError when the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, for only then do accepted connections get TCP_NODELAY from asyncio.
    server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(2048)
    except OSError:
        server.close()
        raise
    server.setblocking(False)
    return server
