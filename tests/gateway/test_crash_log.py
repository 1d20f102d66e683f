"""No exception puts a prompt into the log, whichever library logs the exception."""

import asyncio
import io
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc._common import serialize

from baton_gateway.answers.choice import Choice
from baton_gateway.concurrency.crash_log import CrashFormatter
from baton_gateway.main import main
from baton_gateway.settings import GatewaySettings
from baton_gateway.web.edge import Edge
from baton_gateway.web.server import GatewayProtocol
from baton_proto import serving_pb2 as pb

from .fake_worker import say
from .harness import Stack, pods, running

SECRET = "the patient's name"


class LeakyError(Exception):
    """An error that quotes its input, as errors of pydantic and tokenizers do."""

    def __init__(self) -> None:
        super().__init__(f"cannot use {SECRET!r}")


def fail(*_args: Any, **_named: Any) -> Any:
    try:
        raise LeakyError
    except LeakyError as error:
        raise ValueError(SECRET) from error


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All that `baton gateway` would log, of every logger."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(CrashFormatter("gateway"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel("INFO")
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


async def logged(log: io.StringIO, text: str) -> str:
    """Wait for a line that holds this text; return the log, in which the secret must not be."""
    async with asyncio.timeout(5):
        while text not in log.getvalue():
            await asyncio.sleep(0.01)
    assert SECRET not in log.getvalue()
    return log.getvalue()


async def test_before_an_answer(stack: Stack, log: io.StringIO, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack.gateway.catalog, "find", fail)
    assert (await stack.complete(SECRET)).status_code == 500
    assert '"exception_type":"ValueError"' in await logged(log, "request crashed")
    assert "test_crash_log.py" in log.getvalue()


async def test_within_a_stream(stack: Stack, log: io.StringIO, monkeypatch: pytest.MonkeyPatch):
    fed = []

    def feed(choice: Choice, delta: pb.Delta) -> Any:
        fed.append(delta)
        return plain(choice, delta) if len(fed) == 1 else fail()

    plain = Choice.feed
    monkeypatch.setattr(Choice, "feed", feed)
    stack.pod.script = say(stack.ids("hello lazy dog"))
    response = await stack.complete(SECRET, stream=True)
    assert '"code":"internal_error"' in response.text
    assert '"exception_type":"ValueError"' in await logged(log, "stream failed")


async def test_at_the_edge(stack: Stack, log: io.StringIO, monkeypatch: pytest.MonkeyPatch):
    """What passes the outermost layer of ours is logged by uvicorn."""
    monkeypatch.setattr(Edge, "_finish", fail)
    await stack.complete(SECRET)
    assert "LeakyError" in await logged(log, "Exception in ASGI application")


async def test_in_a_task_that_nobody_awaits(stack: Stack, log: io.StringIO):
    async def work() -> None:
        fail()

    task = asyncio.create_task(work(), name=SECRET)
    await asyncio.wait([task])
    del task
    assert '"exception_type":"ValueError"' in await logged(log, "exception in the event loop")


async def test_in_a_callback(stack: Stack, log: io.StringIO):
    asyncio.get_running_loop().call_soon(fail, SECRET)
    await logged(log, "exception in the event loop")


async def test_in_the_protocol(stack: Stack, log: io.StringIO, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GatewayProtocol, "data_received", fail)
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(SECRET.encode())
    assert '"exception_type":"ValueError"' in await logged(log, "exception in the event loop")
    writer.close()


@pytest.mark.processes
async def test_while_the_stream_of_a_pod_is_read(model_folder: Path, log: io.StringIO):
    async with pods() as decodes, running(model_folder, decodes) as stack:
        assert (await stack.complete()).status_code == 200  # by then the pod has the stream
        [contact] = stack.fleet._contacts.values()
        contact.link._read = fail
        stack.pod.drop_streams()
        assert '"exception_type":"ValueError"' in await logged(log, "background task failed")


async def test_when_grpc_cannot_serialize(stack: Stack, log: io.StringIO):
    assert serialize(SECRET, fail) is None
    assert "LeakyError" in await logged(log, "Exception serializing message!")


def test_in_a_thread_that_logs(log: io.StringIO):
    def work() -> None:
        try:
            fail()
        except ValueError:
            logging.getLogger("some.library").exception("work failed")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "work failed" in log.getvalue()
    assert SECRET not in log.getvalue()


def test_exceptions_that_name_each_other(log: io.StringIO):
    first, second = ValueError(SECRET), KeyError(SECRET)
    first.__cause__, second.__cause__ = second, first
    logging.getLogger("some.library").error("both failed", exc_info=first)
    assert SECRET not in log.getvalue()
    assert "ValueError\\n\\nKeyError" in log.getvalue()


@pytest.mark.processes
def test_the_gateway_logs_by_it(model_folder: Path):
    root = logging.getLogger()
    before, level, uvicorn_level = root.handlers[:], root.level, logging.getLogger("uvicorn.error").level
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = GatewaySettings(model=model_folder, decode_addresses=["x:1"], host="127.0.0.1", port=port)
        try:
            with pytest.raises(SystemExit):
                main(settings)
            assert [type(handler.formatter) for handler in root.handlers] == [CrashFormatter]
        finally:
            root.handlers[:] = before
            root.setLevel(level)
            logging.getLogger("uvicorn.error").setLevel(uvicorn_level)
