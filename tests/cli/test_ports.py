"""Addresses and free ports."""

import asyncio
import socket
import subprocess
import sys

import pytest

from baton_cli.errors import UserError
from baton_cli.ports import Address, check_usable, free_loopback_ports

pytestmark = pytest.mark.processes


def test_free_ports_are_different_and_nobody_listens_on_them() -> None:
    ports = free_loopback_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_shared_by_a_reuseport_server_counts_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        monkeypatch.setattr("baton_cli.ports._WORKER_PORTS", range(taken, taken + 1))
        assert free_loopback_ports(1) == []
    assert free_loopback_ports(1) == [taken]


def test_a_given_port_is_given_to_nobody_else_and_a_server_can_listen_on_it() -> None:
    [port] = free_loopback_ports(1)
    code = (
        "from baton_cli import ports\n"
        f"ports._WORKER_PORTS = range({port}, {port} + 1)\n"
        "assert ports.free_loopback_ports(1) == []\n"
        f"ports.check_usable(ports.Address(ports.LOOPBACK, {port}))\n"
        "import grpc\n"
        "server = grpc.server(None)\n"
        f"assert server.add_insecure_port('127.0.0.1:{port}') == {port}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_port_left_in_time_wait_is_usable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        with socket.create_connection(address):
            server.accept()[0].close()  # the server closes first, so TIME_WAIT is on its side
    check_usable(address)


@pytest.mark.parametrize(
    ("host", "part"), [("192.0.2.1", "cannot listen on 192.0.2.1:"), ("no.such.host.invalid", "cannot listen on")]
)
def test_a_host_that_is_not_ours_is_refused(host: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        check_usable(Address(host, free_loopback_ports(1)[0]))


@pytest.mark.parametrize(
    ("host", "text"), [("0.0.0.0", "127.0.0.1:80"), ("::", "[::1]:80"), ("10.0.0.7", "10.0.0.7:80")]
)
def test_wildcards_are_reached_on_loopback(host: str, text: str) -> None:
    assert str(Address(host, 80).reachable) == text


@pytest.mark.parametrize(
    ("answer", "ready"),
    [(b"HTTP/1.1 200 OK\r\n\r\n", True), (b"HTTP/1.1 503 No\r\n\r\n", False), (b"", False), (b"200\r\n", False)],
)
async def test_ready_means_status_200(answer: bytes, ready: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer if request.startswith(b"GET /ready HTTP/1.1\r\n") else b"")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        assert await Address(*server.sockets[0].getsockname()).answers_ready() is ready


async def test_nobody_listening_is_not_ready(free_port: int) -> None:
    assert await Address("127.0.0.1", free_port).answers_ready() is False


async def test_a_server_that_never_answers_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with asyncio.timeout(5):
            assert await Address(*server.getsockname()).answers_ready() is False
