"""uvicorn, with what it lacks against slow, broken or hostile clients, and an orderly end."""

import asyncio
import contextlib
import functools
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Generator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..concurrency.crash_log import loop_crashed
from ..endpoints.services import Services
from ..errors import ApiError, bad_request
from ..telemetry.record import SEND_BODY
from .admin import AdminServer
from .body import declared_length
from .certificate import Certificate

MAX_HEAD_BYTES = 64 * 1024
# Bytes that one request may have after its headers, in units of the largest body. The rest of a refused body is read
# and dropped up to here, and no framing (chunks of one byte, trailers) takes more.
MAX_BODIES = 16
TICKS_PER_LOOK = 100  # at the certificate; uvicorn ticks ten times a second


_Send = Callable[[Any], Awaitable[None]]


class ServerConfig(uvicorn.Config):
    """uvicorn's settings, and what the protocol asks the gateway for."""

    def __init__(self, services: Services, app: FastAPI, certificate: Certificate | None = None) -> None:
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
            timeout_graceful_shutdown=services.settings.shutdown_grace_s,
        )
        self.services = services
        self.certificate = certificate

    def load(self) -> None:
        super().load()
        if self.certificate is not None:
            self.ssl = self.certificate.context


class GatewayProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on headers and on what nobody reads, and errors in the API's form.

    An answer may be complete before its request is, for example when the key is wrong. The rest of that request is then
    read and dropped, for at most `body_timeout_s`, so that a client that sends everything first still sees its answer:
    closing a socket with unread bytes would reset the connection. While the gateway drains, each answer closes its
    connection.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        assert isinstance(self.config, ServerConfig)
        self._services = self.config.services
        self._max_body_bytes = MAX_BODIES * self._services.settings.max_body_bytes
        self._head_bytes = 0
        self._body_bytes = 0
        self._begun = False
        self._receiving = False
        self._last = False  # the answer that is being sent, or was sent, is the connection's last
        self._head_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        self._discard_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        else:
            self._body_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes."))
        elif self._receiving and self._body_bytes > self._max_body_bytes:
            self.transport.close()
        elif self._idle and self.timeout_keep_alive_task is None:
            # uvicorn stops this timer whenever bytes arrive, also the rest of a request that has been answered.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = self._receiving = True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is not None:  # trailers are dropped: no limit on headers covers them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_done()
        self._body_bytes = 0
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None:
            plain = cycle.scope[SEND_BODY] = cycle.send  # type: ignore[literal-required]
            cycle.send = functools.partial(self._send, cycle, plain)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._receiving = False
        self._discard_done()
        if self._last and self.cycle.response_complete:
            self.transport.close()

    def on_response_complete(self) -> None:
        if self._last:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
        else:
            super().on_response_complete()
        if self.transport.is_closing():
            return
        # A pipelined request, which is `cycle` then, is not answered yet.
        if self.cycle.response_complete and self.cycle.more_body:
            self._discard()
        elif self._last:
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection as soon as no request is under way on it, one whose headers are arriving included."""
        if self._discard_timer is not None:
            self.transport.close()
        elif self._answering:
            self._last = not self.pipeline
        elif not self._receiving:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(bad_request(msg))

    async def _send(self, cycle: RequestResponseCycle, plain: _Send, message: Any) -> None:
        """Send as the application asks, and say at an answer's start whether the connection ends with it."""
        if cycle.response_started:
            await plain(message)
            return
        if self._closes_with(cycle):
            cycle.keep_alive = False
        await plain(message)
        if cycle.response_started:
            # Else uvicorn would close at the end of the answer, even while the request is still arriving.
            self._last, cycle.keep_alive = not cycle.keep_alive, True
            del vars(cycle)["send"]  # it refers to the cycle, which would then wait for the garbage collector

    def _closes_with(self, cycle: RequestResponseCycle) -> bool:
        if self._services.draining and not self.pipeline:
            return True
        if not cycle.more_body:
            return False
        # Without its "100 Continue" a client may leave the body out: what comes next would be ambiguous.
        length = declared_length(cycle.scope["headers"])
        return cycle.waiting_for_100_continue or (length is not None and length > self._max_body_bytes)

    def _discard(self) -> None:
        """Read and drop the rest of a request that has been answered."""
        self.cycle.body.clear()
        self._discard_timer = self.loop.call_later(self._services.settings.body_timeout_s, self.transport.close)
        if self._last and self.transport.can_write_eof():
            self.transport.write_eof()

    def _discard_done(self) -> None:
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(self._services.settings.head_timeout_s, self._head_late)

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

    @property
    def _idle(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete and not self._receiving

    def _refuse(self, error: ApiError) -> None:
        """Answer what never became a request, and close. A request that has been answered gets no second answer."""
        self._head_done()
        body = error.body()
        if not self._answering and self._discard_timer is None:
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (error.status, len(body), body)
            )
        self.transport.close()


class GatewayServer(uvicorn.Server):
    """Ends on SIGTERM or SIGINT.

    Readiness falls at once. For `drain_delay_s`, as load balancers take time to notice, requests are served as before;
    each answer closes its connection, so that clients come to another gateway without losing a request. A connection
    without a request stays open until then, since a request may be on its way on it. Then listening ends, idle
    connections are closed, new requests are refused, and running ones get `shutdown_grace_s`. A second signal ends all
    of it at once.
    """

    def __init__(self, services: Services, config: ServerConfig, admin: socket.socket) -> None:
        """admin: the listening socket for operators, who are served until the end."""
        super().__init__(config)
        self._services = services
        self._admin = admin
        self._drained_at = 0.0  # of the monotonic clock; set by the first signal

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        handler_before = loop.get_exception_handler()
        loop.set_exception_handler(loop_crashed)
        admin = AdminServer(self._services)
        serving = asyncio.create_task(admin.serve([self._admin]))
        try:
            await super().serve(sockets)
        finally:
            # Until the last stream has ended operators see how that goes.
            admin.should_exit = True
            await serving
            loop.set_exception_handler(handler_before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        else:
            self._drained_at = time.monotonic() + self._services.settings.drain_delay_s
        self._services.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.draining = self._services.catalog.refusing = True
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        assert isinstance(self.config, ServerConfig)
        if self.config.certificate is not None and counter % TICKS_PER_LOOK == 0:
            self.config.certificate.follow()
        ending = await super().on_tick(counter)
        return ending and (self.force_exit or time.monotonic() >= self._drained_at)

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
