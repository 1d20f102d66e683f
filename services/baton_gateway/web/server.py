"""uvicorn with limits against slow, broken or hostile clients, and with a graceful shutdown."""

import asyncio
import contextlib
import functools
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..concurrency.crash_log import loop_crashed
from ..endpoints.services import Services
from ..errors import ApiError, bad_request, overloaded
from ..telemetry.record import SEND_BODY
from .admin import AdminServer
from .body import declared_length
from .certificate import Certificate
from .connections import Connections, most_connections
from .handshake import Handshake

MAX_HEAD_BYTES = 64 * 1024
# Most bytes that a request may send after its headers, as a multiple of max_body_bytes. The rest of a refused body is
# read and dropped up to this limit, which also counts framing (chunks of one byte, trailers).
SENT_BYTES_FACTOR = 16
# Most pipelined requests of a connection that wait for earlier answers. uvicorn parses all requests that have arrived,
# which may be thousands in one read of the socket. Without a limit they block the event loop and use unbounded memory.
MAX_PIPELINED = 64
TICKS_PER_CERTIFICATE_CHECK = 100  # between checks of the certificate; uvicorn ticks ten times a second


_Send = Callable[[Any], Awaitable[None]]


class ServerConfig(uvicorn.Config):
    """uvicorn's settings, plus the gateway and its TLS certificate."""

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
        self.connections = Connections(most_connections())

    def load(self) -> None:
        super().load()
        if self.certificate is not None:
            # uvicorn has no `ssl` here, because Handshake begins TLS.
            self.http_protocol_class = self._start_tls  # type: ignore[assignment]

    def _start_tls(self, **arguments: Any) -> Handshake:
        assert self.certificate is not None
        make_protocol = functools.partial(GatewayProtocol, **arguments)
        return Handshake(
            make_protocol, self.certificate.context, self.connections, self.services.settings.head_timeout_s
        )


class GatewayProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on headers and on unread bodies, and with errors in the API's form.

    An answer may be complete before its request is, for example when the key is wrong. The rest of that request is then
    read and dropped, for at most `body_timeout_s`, so that a client that sends everything first still sees its answer:
    closing a socket with unread bytes would reset the connection. While the gateway drains, each answer closes its
    connection.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        assert isinstance(self.config, ServerConfig)
        self._services = self.config.services
        self._connections = self.config.connections
        self._max_sent_bytes = SENT_BYTES_FACTOR * self._services.settings.max_body_bytes
        self._head_bytes = 0
        self._body_bytes = 0
        self._begun = False
        self._receiving = False
        self._last = False  # the connection closes after the current or last answer
        self._answered: RequestResponseCycle | None = None  # the request that is being answered, or was last
        self._head_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        if self._connections.add(self):
            self._await_head()
        else:
            self._refuse(overloaded("The gateway has too many connections. Try again later."))

    def drop(self) -> None:
        # Closing would wait for a client that does not read, or does not end TLS.
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            # Closing would wait for ever for a client that does not read the end of its last answer.
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._head_done()
        self._discard_done()
        super().connection_lost(exc)
        # uvicorn notifies only the newest request of the connection, which may still be waiting to be processed.
        self.pipeline.clear()
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
            self._answered = None

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
        elif self._receiving and self._body_bytes > self._max_sent_bytes:
            self.transport.close()
        elif self._idle and self.timeout_keep_alive_task is None:
            # uvicorn stops this timer whenever bytes arrive, even those of a request that has been answered.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            # This ends the parsing, and the connection as after any other malformed input.
            raise bad_request(f"More than {MAX_PIPELINED} pipelined requests wait for earlier answers.")
        super().on_message_begin()
        self._begun = self._receiving = True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is not None:  # trailers are dropped, because MAX_HEAD_BYTES does not cover them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_done()
        self._body_bytes = 0
        if self.parser.should_upgrade() and _has_body(self.headers):
            # The parser skips such a body and would read it as the next request. Behind a proxy that reuses connections
            # the next client would get that request's answer.
            raise bad_request("Connections are not upgraded: send this request without the header Upgrade.")
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None:
            plain = cycle.scope[SEND_BODY] = cycle.send  # type: ignore[literal-required]
            cycle.send = functools.partial(self._send, cycle, plain)  # type: ignore[method-assign]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        self._connections.serve(self)
        super()._start_asgi_task(cycle, functools.partial(self._answer, cycle, app))

    async def _answer(self, cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        if cycle.response_started and not cycle.response_complete:
            # Otherwise a client that does not read would keep its connection and the bytes that were not sent.
            self.transport.abort()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._receiving = False
        self._discard_done()
        if self._last and self.cycle.response_complete:
            self.transport.close()

    def on_response_complete(self) -> None:
        self._connections.wait(self)
        if self._last:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
        else:
            super().on_response_complete()
        if self.transport.is_closing():
            return
        # With pipelining, `cycle` is already the next request, which is not answered yet.
        if self.cycle.response_complete and self.cycle.more_body:
            self._discard()
        elif self._last:
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection as soon as no request is running or arriving on it. Arriving begins with the headers."""
        if self._discard_timer is not None:
            self.transport.close()
        elif self._answering:
            self._last = not self.pipeline
        elif not self._receiving:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls this while it handles the parser's error, whose context is the error of our callback, if any.
        reason = getattr(sys.exception(), "__context__", None)
        self._refuse(reason if isinstance(reason, ApiError) else bad_request(msg))

    async def _send(self, cycle: RequestResponseCycle, plain: _Send, message: Any) -> None:
        """Send a message of the application. The start of an answer says whether the connection closes after it."""
        if cycle.response_started:
            await plain(message)
            return
        if self._closes_with(cycle):
            cycle.keep_alive = False
        await plain(message)
        if cycle.response_started:
            # Otherwise uvicorn would close at the end of the answer, even while the request is still arriving.
            self._last, cycle.keep_alive = not cycle.keep_alive, True
            # The attribute refers back to the cycle. Without it the cycle is freed at once, not by the garbage
            # collector.
            del vars(cycle)["send"]

    def _closes_with(self, cycle: RequestResponseCycle) -> bool:
        if self._services.draining and not self.pipeline:
            return True
        if not cycle.more_body:
            return False
        # A client that got no "100 Continue" may omit the body, so the next bytes could be the body or a request.
        length = declared_length(cycle.scope["headers"])
        return cycle.waiting_for_100_continue or (length is not None and length > self._max_sent_bytes)

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
        """Answer a malformed request with an error and close the connection.

        A request that has been answered gets no second answer.
        """
        self._head_done()
        body = error.body()
        if not self._answering and self._discard_timer is None:
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (error.status, len(body), body)
            )
        self.transport.close()


def _has_body(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return bool(declared_length(headers)) or any(name == b"transfer-encoding" for name, _ in headers)


class GatewayServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then shuts down gracefully.

    The gateway stops being ready at once. For `drain_delay_s`, while load balancers notice this, it still serves
    requests. Each answer then closes its connection, so that clients reconnect to another gateway without losing a
    request. An idle connection stays open during that time, since a request may already be on its way. Then listening
    ends, idle connections are closed, new requests are refused, and running ones get `shutdown_grace_s` to finish. A
    second signal ends everything at once.
    """

    def __init__(self, services: Services, config: ServerConfig, admin: socket.socket) -> None:
        """admin: the listening socket for operators, who are served until the end."""
        super().__init__(config)
        self._services = services
        self._admin = admin
        self._drained_at = 0.0  # monotonic time at which draining ends; set by the first signal

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        handler_before = loop.get_exception_handler()
        loop.set_exception_handler(loop_crashed)
        admin = AdminServer(self._services)
        serving = asyncio.create_task(admin.serve([self._admin]))
        try:
            await super().serve(sockets)
        finally:
            # Operators can watch the shutdown on the admin port until the last stream has ended.
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
        if self.config.certificate is not None and counter % TICKS_PER_CERTIFICATE_CHECK == 0:
            self.config.certificate.follow()
        ending = await super().on_tick(counter)
        return ending and (self.force_exit or time.monotonic() >= self._drained_at)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while serving. Unlike uvicorn, do not raise them again: a graceful shutdown exits with 0."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def listen(host: str, port: int) -> socket.socket:
    """Bind a listening socket. Raises OSError when the port is in use or this host lacks the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named explicitly: only then does asyncio set TCP_NODELAY on accepted connections.
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
