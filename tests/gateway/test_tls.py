"""TLS without a proxy in front, and certificates that are replaced while connections are open."""

import asyncio
import os
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from baton_gateway.web import server
from baton_gateway.web.certificate import Certificate
from baton_gateway.web.connections import Connections

from .harness import events, pods, running

CA = trustme.CA()


def write_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """Issue a certificate, and put it in the place of the one that is there."""
    issued = CA.issue_cert(name)
    paths = folder / "tls.crt", folder / "tls.key"
    contents = b"".join(blob.bytes() for blob in issued.cert_chain_pems), issued.private_key_pem.bytes()
    for path, content in zip(paths, contents, strict=True):
        path.with_suffix(".new").write_bytes(content)
        os.replace(path.with_suffix(".new"), path)
    return paths


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    CA.configure_trust(context)
    return context


async def served_name(port: int) -> str:
    """Return for whom the certificate is that a new connection gets."""
    context = trusting()
    context.check_hostname = False
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    [(_, name)] = writer.get_extra_info("peercert")["subjectAltName"]
    writer.close()
    return name


@pytest.mark.processes
async def test_answers_and_streams_come_over_tls(model_folder: Path, tmp_path: Path):
    certificate = Certificate(*write_certificate(tmp_path))
    async with (
        pods() as decodes,
        running(model_folder, decodes, certificate=certificate) as stack,
        httpx.AsyncClient(base_url=f"https://localhost:{stack.port}", verify=trusting()) as client,
    ):
        body = {"model": "tiny", "prompt": "hello", "stream": True}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert events(response)[-1]["choices"][0]["finish_reason"]
        with pytest.raises(httpx.HTTPError):
            await stack.http.get("/health")


@pytest.mark.processes
async def test_a_new_certificate_is_used_for_new_connections(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "TICKS_PER_CERTIFICATE_CHECK", 1)
    certificate = Certificate(*write_certificate(tmp_path, "before.test"))
    async with pods() as decodes, running(model_folder, decodes, certificate=certificate) as stack:
        assert await served_name(stack.port) == "before.test"
        # A key that is not the certificate's is refused, and what was there stays.
        (tmp_path / "tls.key").write_bytes(CA.issue_cert("other.test").private_key_pem.bytes())
        await asyncio.sleep(0.5)
        assert await served_name(stack.port) == "before.test"
        write_certificate(tmp_path, "after.test")
        async with asyncio.timeout(10):
            while await served_name(stack.port) != "after.test":
                await asyncio.sleep(0.05)


@pytest.mark.processes
async def test_a_handshake_that_never_ends_counts_as_a_connection(model_folder: Path, tmp_path: Path):
    certificate = Certificate(*write_certificate(tmp_path))
    async with pods() as decodes, running(model_folder, decodes, certificate=certificate) as stack:
        connections = stack.server.config.connections = Connections(2)
        silent = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(2)]
        await stack.until(lambda: len(connections._all) == 2)
        assert await served_name(stack.port) == "localhost"
        async with asyncio.timeout(5):
            assert await silent[0][0].read() == b""
        assert not silent[1][0].at_eof()
        silent[1][1].close()
        await stack.until(lambda: not connections._all)


@pytest.mark.processes
async def test_a_handshake_that_takes_too_long(model_folder: Path, tmp_path: Path):
    certificate = Certificate(*write_certificate(tmp_path))
    async with pods() as decodes, running(model_folder, decodes, certificate=certificate, head_timeout_s=0.3) as stack:
        silent, half = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(2)]
        half[1].write(bytes.fromhex("160301020001000200"))  # the first bytes of a handshake
        async with asyncio.timeout(10):
            assert await silent[0].read() == await half[0].read() == b""
        assert not stack.server.config.connections._all


@pytest.mark.processes
async def test_a_connection_that_does_not_end_tls_makes_room_at_once(model_folder: Path, tmp_path: Path):
    certificate = Certificate(*write_certificate(tmp_path))
    async with pods() as decodes, running(model_folder, decodes, certificate=certificate) as stack:
        stack.server.config.connections = Connections(1)
        plain = socket.create_connection(("127.0.0.1", stack.port))
        with await asyncio.to_thread(trusting().wrap_socket, plain, server_hostname="localhost"):
            held = stack.server.server_state.connections
            await stack.until(lambda: len(held) == 1)
            [first] = held
            assert await served_name(stack.port) == "localhost"
            await stack.until(lambda: first not in held)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path):
    chain, key = write_certificate(tmp_path)
    key.write_bytes(CA.issue_cert("other.test").private_key_pem.bytes())
    with pytest.raises(ssl.SSLError):
        Certificate(chain, key)
    with pytest.raises(FileNotFoundError):
        Certificate(tmp_path / "none", key)
