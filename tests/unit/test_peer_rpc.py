"""Who is served over gRPC where pods use TLS, and what happens to open connections when files are replaced."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme

from baton_common.peer_rpc import bind, make_server, open_channel, read_message, why_failed
from baton_common.peer_tls import PeerTls
from tests.chaos.tcp import TcpProxy
from tests.peer_files import NAME, PeerFiles, of_other_authority, without_tls

LOCAL = [("grpc.use_local_subchannel_pool", 1)]

pytestmark = pytest.mark.processes


async def once(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return request


async def many(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def written(request: bytes, context: grpc.aio.ServicerContext) -> None:
    for _ in range(2):
        await context.write(request)


@asynccontextmanager
async def serving(tls: PeerTls | None) -> AsyncIterator[str]:
    server = make_server([("grpc.so_reuseport", 0)], tls)
    handlers = {
        "Once": grpc.unary_unary_rpc_method_handler(once),
        "Many": grpc.stream_stream_rpc_method_handler(many),
        "Written": grpc.unary_stream_rpc_method_handler(written),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
    port = bind(server, "127.0.0.1:0", tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


async def echo(channel: grpc.aio.Channel) -> bytes:
    answer = await asyncio.wait_for(channel.unary_unary("/Echo/Once")(b"hello"), 10)
    assert isinstance(answer, bytes)
    return answer


async def refusal(address: str, tls: PeerTls | None) -> grpc.aio.AioRpcError:
    async with open_channel(address, LOCAL, tls) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await echo(channel)
    return refused.value


async def test_peers_are_served_in_every_way(tmp_path: Path):
    tls = PeerFiles(tmp_path).load()
    async with serving(tls) as address, open_channel(address, LOCAL, tls) as channel:
        assert await echo(channel) == b"hello"
        async for answer in (many := channel.stream_stream("/Echo/Many")(iter([b"a", b"b"]))):
            assert answer in (b"a", b"b")
        assert await many.code() == grpc.StatusCode.OK
        assert [answer async for answer in channel.unary_stream("/Echo/Written")(b"c")] == [b"c", b"c"]
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/Echo/Nothing")(b"")
        assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_name_of_another_release_is_refused_by_both(tmp_path: Path):
    files = PeerFiles(tmp_path / "ours")
    theirs = PeerFiles(tmp_path / "theirs", "other-peer", files.authority).load()
    async with serving(files.load()) as address:
        assert "Hostname Verification Check failed" in why_failed(await refusal(address, theirs))
        theirs.name = files.name
        # A message that a stream sends while the refusal arrives would end the call with another status.
        ways: dict[str, Callable[[grpc.aio.Channel], Awaitable[object]]] = {
            "Once": lambda channel: channel.unary_unary("/Echo/Once")(b"a"),
            "Many": lambda channel: channel.stream_stream("/Echo/Many")().read(),
            "Written": lambda channel: channel.unary_stream("/Echo/Written")(b"a").read(),
        }
        for call in ways.values():
            async with open_channel(address, LOCAL, theirs) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await asyncio.wait_for(call(channel), 10)
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
            assert refused.value.details() == "the client's certificate is not for 'baton-peer'"


@pytest.mark.parametrize("stranger", [of_other_authority, without_tls])
async def test_strangers_are_refused_and_hear_what_may_be_wrong(
    tmp_path: Path, stranger: Callable[[Path, PeerFiles], PeerTls | None]
):
    files = PeerFiles(tmp_path / "peers")
    async with serving(files.load()) as address:
        refused = await refusal(address, stranger(tmp_path / "stranger", files))
    assert refused.code() == grpc.StatusCode.UNAVAILABLE
    assert "--peer-tls-cert-file" in why_failed(refused)


async def test_a_client_without_a_certificate_is_refused(tmp_path: Path):
    files = PeerFiles(tmp_path)
    async with serving(files.load()) as address:
        credentials = grpc.ssl_channel_credentials(files.roots.read_bytes())
        options = [*LOCAL, ("grpc.ssl_target_name_override", NAME)]
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await echo(channel)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_servers_that_are_no_peers_are_refused(tmp_path: Path):
    tls = PeerFiles(tmp_path / "peers").load()
    async with serving(None) as address:
        assert "WRONG_VERSION_NUMBER" in why_failed(await refusal(address, tls))
    async with serving(PeerFiles(tmp_path / "others").load()) as address:
        assert "CERTIFICATE_VERIFY_FAILED" in why_failed(await refusal(address, tls))


async def test_renewed_files_are_for_new_connections(tmp_path: Path):
    """Here the authority changes, too, so that it shows who goes by which files."""
    files = PeerFiles(tmp_path / "peers")
    tls, before = files.load(), PeerFiles(tmp_path / "copy", authority=files.authority)
    async with serving(tls) as address, open_channel(address, LOCAL, tls) as channel:
        stream = channel.stream_stream("/Echo/Many")()
        await stream.write(b"1")
        assert await stream.read() == b"1"
        files.renew(trustme.CA())
        async with open_channel(address, LOCAL, tls) as renewed:
            assert await echo(renewed) == b"hello"
        assert "CERTIFICATE_VERIFY_FAILED" in why_failed(await refusal(address, before.load()))
        await stream.write(b"2")
        assert await stream.read() == b"2"
        await stream.done_writing()
        assert await stream.code() == grpc.StatusCode.OK


async def test_a_cancelled_reader_ends_as_cancelled_when_the_call_fails_at_that_moment() -> None:
    """The connections of many calls that wait for their first answer break. Whoever reads another call that breaks with
    them cancels these readers, at the same moment as gRPC tells them of the failure."""
    unanswered = asyncio.Event()

    async def wait(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async for request in requests:
            if request == b"answered":
                yield request
        await unanswered.wait()

    server = make_server([("grpc.so_reuseport", 0)], None)
    handler = grpc.stream_stream_rpc_method_handler(wait)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", {"Wait": handler}),))
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    proxy = TcpProxy()
    address = await proxy.front(f"127.0.0.1:{port}")
    try:
        for _ in range(60):
            async with open_channel(address, LOCAL, None) as channel:
                method = channel.stream_stream("/Echo/Wait")
                calls, first = [method() for _ in range(20)], method()
                for call in calls:
                    await call.write(b"unanswered")
                await first.write(b"answered")
                assert await read_message(first) == b"answered"
                readers = [asyncio.create_task(read_message(call)) for call in calls]
                await asyncio.sleep(0.01)
                proxy.cut()
                with pytest.raises(grpc.aio.AioRpcError):
                    await read_message(first)
                late = [reader for reader in readers if not reader.done()]
                for reader in late:
                    reader.cancel()
                await asyncio.wait(readers)
                assert all(reader.cancelled() for reader in late)
    finally:
        await server.stop(grace=0)
        await proxy.stop()
