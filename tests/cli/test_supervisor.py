"""The supervisor against scripted children: each is a small Python program."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

READY = "import json, signal, sys, time; print(json.dumps({'event': 'ready'}));"
SERVE = f"{READY} signal.pause()"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY} time.sleep(100)"
SUPERVISE = Path(__file__).with_name("supervise.py")

pytestmark = pytest.mark.processes


def child(name: str, code: str = SERVE, **more: object) -> dict:
    return {"name": name, "code": code, **more}


def http_server(port: int, status_file: Path) -> str:
    """Answers every request with the status that the file holds."""
    return f"""
import socket
server = socket.create_server(("127.0.0.1", {port}))
while True:
    connection, _ = server.accept()
    connection.recv(4096)
    status = open({str(status_file)!r}).read()
    connection.sendall(f"HTTP/1.1 {{status}} x\\r\\nContent-Length: 0\\r\\n\\r\\n".encode())
    connection.close()
"""


def recorder(file: Path, name: str, linger_s: float = 0.0) -> str:
    """Writes when SIGTERM or SIGINT came and when it left."""
    return f"""
import json, signal, time
def note(what):
    with open({str(file)!r}, "a") as stream:
        stream.write(json.dumps(["{name}", what, time.monotonic()]) + "\\n")
def leave(number, frame):
    note(signal.Signals(number).name)
    time.sleep({linger_s})
    note("left")
    raise SystemExit
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
print(json.dumps({{"event": "ready"}}))
while True:
    time.sleep(1)
"""


def gone(processes: list[psutil.Process], timeout: float = 5.0) -> bool:
    return not psutil.wait_procs(processes, timeout=timeout)[1]


def test_greets_only_when_the_front_answers_ready(supervise: Callable, tmp_path: Path, free_port: int) -> None:
    status = tmp_path / "status"
    status.write_text("503")
    running = supervise([[child("front", http_server(free_port, status), ready_port=free_port)], [child("worker")]])
    running.when("worker   ready")
    time.sleep(0.5)
    assert "GREETING" not in running.text
    status.write_text("200")
    running.when("front    ready")
    running.when("GREETING")


def test_shows_how_far_loading_is(supervise: Callable) -> None:
    code = """
import json, time
for done in range(9):
    print(json.dumps({"level": "info", "message": "loading", "event": "loading", "done": done, "total": 8}))
print(json.dumps({"event": "ready"}))
time.sleep(100)
"""
    running = supervise([[child("worker", code)]])
    running.when("ready")
    states = [line.split("   ")[1] for _, line in running.lines if line.startswith("worker   ")]
    assert states == ["starting", *(f"loading {percent} %" for percent in (0, 25, 50, 75, 100)), "ready"]


def test_restarts_a_dead_child_with_growing_delays_and_greets_once(supervise: Callable) -> None:
    running = supervise([[child("front")], [child("worker", f"{READY} time.sleep(0.2); sys.exit(7)")]])
    first = running.when("restarting in 0.5 s")
    again = running.when("worker   ready", count=2)
    assert again - first >= 0.5
    second = running.when("restarting in 1 s")
    again = running.when("worker   ready", count=3)
    assert again - second >= 1.0
    assert "worker exited with code 7" in running.text
    assert running.text.count("GREETING") == 1
    running.interrupt()
    assert running.wait() == 0


def test_says_which_signal_ended_a_child(supervise: Callable) -> None:
    running = supervise([[child("worker")]])
    running.when("ready")
    (process,) = running.children()
    process.send_signal(signal.SIGKILL)
    running.when("worker was ended by SIGKILL")
    running.when("ready", count=2)


def test_three_failed_starts_end_everything_with_the_last_lines(supervise: Callable) -> None:
    failing = "import sys; print('a first word'); sys.exit('no such weights')"
    running = supervise([[child("front")], [child("worker", failing), child("other")]])
    running.when("other    ready")
    others = [process for process in running.children() if "child-worker" not in process.cmdline()]
    assert running.wait() == 1
    assert running.text.count("worker exited with code 1") == 3
    ending = running.text.split("worker failed to start 3 times in a row")[1]
    assert "  a first word\n  no such weights" in ending
    assert gone(others)


def test_a_child_that_was_ready_once_is_never_given_up(supervise: Callable, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    code = f"""
import json, pathlib, sys, time
mark = pathlib.Path({str(mark)!r})
if not mark.exists():
    mark.touch()
    print(json.dumps({{"event": "ready"}}))
    time.sleep(0.1)
sys.exit(1)
"""
    running = supervise([[child("worker", code)]])
    running.when("worker exited with code 1", count=4)
    running.when("restarting in 4 s")
    assert running.process.poll() is None


def test_a_bad_setting_is_not_tried_again(supervise: Callable) -> None:
    running = supervise([[child("worker", "import sys; print('--dtype: unknown'); sys.exit(2)")]])
    assert running.wait() == 1
    assert running.text.count("worker exited with code 2") == 1
    assert "  --dtype: unknown" in running.text


def test_ctrl_c_stops_stage_by_stage(supervise: Callable, tmp_path: Path) -> None:
    file = tmp_path / "events"
    names = ["gateway", "decode", "prefill"]
    gateway, decode, prefill = (child(name, recorder(file, name, linger_s=0.4)) for name in names)
    running = supervise([[gateway], [decode, prefill]])
    for name in names:
        running.when(f"{name:7}   ready")
    processes = running.children()
    running.interrupt()
    assert running.wait() == 0
    assert gone(processes, timeout=0)

    events = [json.loads(line) for line in file.read_text().splitlines()]
    at = {(name, what): when for name, what, when in events}
    # The children did not receive the terminal's SIGINT.
    assert {what for _, what, _ in events} == {"SIGTERM", "left"}
    for worker in ("decode", "prefill"):
        assert at["gateway", "left"] <= at[worker, "SIGTERM"]
    assert max(at["decode", "SIGTERM"], at["prefill", "SIGTERM"]) < min(at["decode", "left"], at["prefill", "left"])


def test_sigterm_stops_as_ctrl_c_does(supervise: Callable) -> None:
    running = supervise([[child("front")], [child("worker")]])
    running.when("GREETING")
    processes = running.children()
    running.process.terminate()
    assert running.wait() == 0
    assert gone(processes, timeout=0)


def test_ctrl_c_ends_a_wait_for_a_restart(supervise: Callable) -> None:
    running = supervise([[child("worker", f"{READY} time.sleep(0.1); sys.exit(1)")]])
    running.when("restarting in 2 s")
    running.interrupt()
    begun = time.monotonic()
    assert running.wait() == 0
    assert time.monotonic() - begun < 1.8


def test_a_deaf_child_is_killed_after_its_grace(supervise: Callable) -> None:
    running = supervise([[child("deaf", DEAF, grace_s=0.5)]])
    running.when("ready")
    processes = running.children()
    begun = time.monotonic()
    running.interrupt()
    assert running.wait() == 0
    assert time.monotonic() - begun >= 0.5
    assert "deaf did not stop within 0.5 s: killed" in running.text
    assert gone(processes, timeout=0)


def test_a_second_ctrl_c_kills_at_once(supervise: Callable) -> None:
    running = supervise([[child("front", DEAF, grace_s=60)], [child("worker", DEAF, grace_s=60)]])
    running.when("GREETING")
    running.when("worker   ready")
    processes = running.children()
    running.interrupt()
    running.when("Ctrl-C again kills at once")
    running.interrupt()
    assert running.wait(timeout=5) == 130
    assert gone(processes, timeout=0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ties children to the supervisor on Linux only")
def test_a_killed_supervisor_leaves_no_orphan(supervise: Callable) -> None:
    running = supervise([[child("front")], [child("worker", DEAF)]])
    running.when("GREETING")
    running.when("worker   ready")
    processes = running.children()
    assert len(processes) == 2
    running.process.kill()
    assert gone(processes)


def test_what_a_dead_child_leaves_behind_is_killed(supervise: Callable) -> None:
    code = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
{READY} signal.pause()
"""
    running = supervise([[child("worker", code)]])
    running.when("ready")
    leader, left_behind = sorted(running.children(), key=lambda process: process.pid)
    leader.kill()
    assert gone([left_behind])
    running.when("ready", count=2)


def test_a_line_without_end_does_not_stop_the_reading(supervise: Callable) -> None:
    running = supervise([[child("worker", f"print('x' * 3_000_000); {READY} time.sleep(100)")]])
    running.when("worker   ready")


def test_info_lines_are_shown_until_the_greeting_and_warnings_always(supervise: Callable) -> None:
    running = supervise([[child("front", TALKER)]])
    running.when("front | warning: two and three=3")
    assert "front | info: one" in running.text
    assert "info: two" not in running.text
    assert "front | not JSON" in running.text


def test_debug_shows_everything(supervise: Callable) -> None:
    running = supervise([[child("front", TALKER)]], level="debug")
    running.when("front | info: two")


TALKER = """
import json, time
print(json.dumps({"level": "info", "message": "one"}))
print(json.dumps({"event": "ready"}))
time.sleep(0.5)
print(json.dumps({"level": "info", "message": "two"}))
print("not JSON")
print(json.dumps({"level": "warning", "message": "two and", "three": 3}))
time.sleep(100)
"""


def test_on_a_terminal_one_line_per_child_stays_in_place() -> None:
    plan = {"stages": [[child("front")], [child("worker")]]}
    master, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, str(SUPERVISE), json.dumps(plan)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm"},
    ) as process:
        os.close(terminal)
        output = read_until(master, b"worker   ready", b"GREETING")
        process.send_signal(signal.SIGINT)
        read_until(master, b"worker   stopped")
        assert process.wait(10) == 0
    assert b"\x1b[1A" in output  # the cursor goes up to draw a line again
    os.close(master)


def read_until(master: int, *parts: bytes) -> bytes:
    output = b""
    while not all(part in without_styles(output) for part in parts):
        output += os.read(master, 4096)
    return output


def without_styles(output: bytes) -> bytes:
    for style in (b"\x1b[0m", b"\x1b[1m", b"\x1b[2m", b"\x1b[31m", b"\x1b[32m", b"\x1b[33m"):
        output = output.replace(style, b"")
    return output
