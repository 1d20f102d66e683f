"""tests/markers.py, in runs of pytest of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
BEGIN = """
import asyncio, contextlib, os, socket, subprocess, sys, threading
import grpc, grpc.aio
import pytest
"""


def run(folder: Path, tests: str, *arguments: str) -> tuple[int, str]:
    """Run a file of tests with the plugin; returns pytest's exit code and output."""
    file = folder / "test_them.py"
    file.write_text(BEGIN + tests)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        folder,
        "-p",
        "tests.markers",
    ]
    options = ["-p", "no:cacheprovider", "-rA", "--color=no"]
    done = subprocess.run([*command, *options, *arguments, file], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


BODIES = {
    "socket.create_server(('127.0.0.1', 0))": "bind a socket",
    "socket.socket().connect(('127.0.0.1', 1))": "connect a socket",
    "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 1))": "send from a socket",
    "subprocess.run([sys.executable, '-c', ''])": "start a process",
    "os.fork() or os._exit(0)": "start a process",
    "asyncio.run(asyncio.open_connection('127.0.0.1', 1))": "connect a socket",
    "asyncio.run(asyncio.create_subprocess_exec('true'))": "start a process",
    "grpc.insecure_channel('127.0.0.1:1')": "open a gRPC insecure channel",
    "grpc.aio.server()": "open a gRPC server",
    # An error that is caught where it is raised, and one in a thread.
    "with contextlib.suppress(Exception): socket.create_server(('127.0.0.1', 0))": "bind a socket",
    "t = threading.Thread(target=socket.create_server, args=(('127.0.0.1', 0),)); t.start(); t.join()": "bind a socket",
}


def test_a_unit_test_with_a_socket_or_a_process_fails(tmp_path: Path) -> None:
    fixture = """
@pytest.fixture(scope="session")
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener

def test_of_a_fixture(listener):
    pass

"""
    tests = "".join(f"def test_{number}():\n    {body}\n\n" for number, body in enumerate(BODIES))
    code, output = run(tmp_path, fixture + tests)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert f" {len(BODIES)} failed," in output
    assert " 1 error " in output
    for number, what in enumerate(BODIES.values()):
        assert f"test_them.py::test_{number} is a unit test and would {what}" in output
    assert "test_them.py::test_of_a_fixture is a unit test and would bind a socket" in output
    assert "Mark it `@pytest.mark.processes`, or, if a fixture does this, let the fixture request" in output


@pytest.mark.parametrize(
    ("marker", "passed"), [("unit", ["test_a_loop_and_a_thread", "test_a_pair"]), ("processes", ["test_with_a_port"])]
)
def test_what_a_test_uses_decides_its_marker(tmp_path: Path, marker: str, passed: list[str]) -> None:
    tests = """
async def test_a_loop_and_a_thread():
    assert await asyncio.to_thread(lambda: 1) == 1

def test_a_pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"

@pytest.fixture(scope="module")
def listener(processes):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener

@pytest.fixture
def port(listener):
    return listener.getsockname()[1]

def test_with_a_port(port):
    socket.create_connection(("127.0.0.1", port)).close()

@pytest.mark.soak
def test_long(port):
    socket.create_connection(("127.0.0.1", port)).close()
"""
    code, output = run(tmp_path, tests, "-m", marker)
    assert code == 0, output
    assert [line.rpartition("::")[2] for line in output.splitlines() if line.startswith("PASSED")] == passed


@pytest.mark.parametrize(
    ("marks", "problem"),
    [("soak processes", "is marked processes and soak; a test has one"), ("sock", "'sock' not found in `markers`")],
)
def test_two_markers_or_an_unknown_one_stop_the_run(tmp_path: Path, marks: str, problem: str) -> None:
    marked = "".join(f"@pytest.mark.{mark}\n" for mark in marks.split())
    code, output = run(tmp_path, f"{marked}def test_it(): pass\n")
    assert code != 0
    assert problem in output
