"""Who is served over gRPC where pods share a token."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from baton_common.peer_refusals import PeerRefusals
from baton_common.peer_rpc import TOKEN_HEADER, bind, make_server, open_channel, why_failed
from baton_common.peer_tls import PeerTls
from baton_common.peer_token import PeerToken
from tests.peer_files import PeerFiles, write_tokens

LOCAL = [("grpc.use_local_subchannel_pool", 1)]
OURS, OTHERS = "our-token-0123456789", "their-token-0123456789"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

pytestmark = pytest.mark.processes


class Echo:
    """A server with one method of each kind, which counts how often a handler has begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.refusals = PeerRefusals()

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        self.begun += 1
        return request

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.begun += 1
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        self.begun += 1
        return b"".join([request async for request in requests])

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.begun += 1
        async for request in requests:
            yield request


@asynccontextmanager
async def serving(token: PeerToken | None, tls: PeerTls | None = None) -> AsyncIterator[tuple[Echo, str]]:
    echo = Echo()
    server = make_server([("grpc.so_reuseport", 0)], tls, token, echo.refusals)
    handlers = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(echo, kind)) for kind in KINDS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    port = bind(server, "127.0.0.1:0", tls)
    await server.start()
    try:
        yield echo, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


async def call(channel: grpc.aio.Channel, kind: str, messages: Sequence[bytes] = (b"a",)) -> bytes:
    """messages: those of a stream."""
    method = getattr(channel, kind)(f"/Echo/{kind}")
    given = method(iter(messages) if kind.startswith("stream") else b"a", timeout=10)
    if kind.endswith("stream"):
        return b"".join([answer async for answer in given])
    answer = await given
    assert isinstance(answer, bytes)
    return answer


def token_of(folder: Path, *tokens: str) -> PeerToken:
    folder.mkdir(exist_ok=True)
    return PeerToken(write_tokens(folder / "tokens", *tokens))


@pytest.mark.parametrize("kind", KINDS)
async def test_who_shows_the_token_is_served(tmp_path: Path, kind: str):
    token = token_of(tmp_path, OURS)
    async with serving(token) as (echo, address), open_channel(address, LOCAL, None, token) as channel:
        assert await call(channel, kind) == b"a"
        assert echo.begun == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shown", [None, OTHERS, OURS[:-1]])
async def test_others_are_refused_before_a_handler_begins(tmp_path: Path, kind: str, shown: str | None):
    stranger = token_of(tmp_path / "theirs", shown) if shown else None
    async with serving(token_of(tmp_path, OURS)) as (echo, address):
        async with open_channel(address, LOCAL, None, stranger) as channel:
            # gRPC's client reports an error of its own when a call is refused while it sends a message of a stream.
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, kind, ())
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert "--peer-token-file" in why_failed(refused.value)
        assert OURS not in why_failed(refused.value)
        assert echo.begun == 0
        assert echo.refusals.counts == {"grpc": 1, "bulk": 0}


async def test_strangers_learn_nothing_of_health_or_of_methods(tmp_path: Path):
    async with serving(token_of(tmp_path, OURS)) as (_, address), open_channel(address, LOCAL, None) as channel:
        for method in ("/grpc.health.v1.Health/Check", "/Echo/Nothing"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(method)(health_pb2.HealthCheckRequest().SerializeToString(), timeout=10)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_two_tokens_in_one_call_are_none(tmp_path: Path):
    """Otherwise one call could try as many as fit."""
    async with serving(token_of(tmp_path, OURS)) as (echo, address), open_channel(address, LOCAL, None) as channel:
        for shown in ((OTHERS, OURS), (OURS, OTHERS)):
            metadata = [(TOKEN_HEADER, token) for token in shown]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/Echo/unary_unary")(b"a", metadata=metadata, timeout=10)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert echo.begun == 0


async def test_a_pod_with_a_token_reaches_one_without(tmp_path: Path):
    async with serving(None) as (_, address), open_channel(address, LOCAL, None, token_of(tmp_path, OURS)) as channel:
        assert await call(channel, "unary_unary") == b"a"


async def test_tls_and_a_token_are_both_needed(tmp_path: Path):
    tls, token = PeerFiles(tmp_path / "tls").load(), token_of(tmp_path, OURS)
    async with serving(token, tls) as (echo, address):
        async with open_channel(address, LOCAL, tls, token) as channel:
            assert await call(channel, "stream_stream") == b"a"
        async with open_channel(address, LOCAL, tls) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, "stream_stream")
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        async with open_channel(address, LOCAL, None, token) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, "stream_stream")
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert echo.begun == 1


async def test_the_token_is_replaced_without_a_refused_call(tmp_path: Path):
    """Pods see the new file one after the other, in any order; what is open stays open."""
    ours, theirs = token_of(tmp_path / "server", OURS), token_of(tmp_path / "client", OURS)
    async with serving(ours) as (echo, address), open_channel(address, LOCAL, None, theirs) as channel:
        stream = channel.stream_stream("/Echo/stream_stream")()
        await stream.write(b"1")
        assert await stream.read() == b"1"
        for step in ((OURS, OTHERS), (OTHERS, OURS), (OTHERS,)):
            for folder in random.sample(("server", "client"), 2):
                write_tokens(tmp_path / folder / "tokens", *step)
                assert await call(channel, "unary_unary") == b"a"
        await stream.write(b"2")
        assert await stream.read() == b"2"
        await stream.done_writing()
        assert await stream.code() == grpc.StatusCode.OK
        assert not echo.refusals.counts["grpc"]
        async with open_channel(address, LOCAL, None, token_of(tmp_path / "late", OURS)) as late:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(late, "unary_unary")
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_whatever_comes_over_the_port_peers_are_served(tmp_path: Path):
    token = token_of(tmp_path, OURS)
    noise = random.Random(0)
    async with serving(token) as (echo, address), open_channel(address, LOCAL, None, token) as channel:
        port = int(address.rpartition(":")[2])
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for number in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((preface if number % 2 else b"") + noise.randbytes(4096))
            assert await call(channel, "unary_unary") == b"a"
            # gRPC may reset the connection while it is still being written to.
            try:
                async with asyncio.timeout(20):
                    while await reader.read(65536):
                        pass
            except ConnectionError:
                pass
            writer.close()
        assert echo.begun == 40


async def test_a_connection_that_only_stays_is_closed(tmp_path: Path):
    async with serving(token_of(tmp_path, OURS)) as (_, address):
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as held:
            held.setblocking(False)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(15):
                while await loop.sock_recv(held, 4096):
                    pass
