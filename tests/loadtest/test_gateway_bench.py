"""The gateway's benchmark at a small size: the real gateway and pods, and the server that stands behind LiteLLM."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from baton_demo import MODEL_DIR
from baton_tokenizer.load import load_tokenizer
from loadtest.gateway.script import Script

from .test_engine_bench import FOLDER

pytestmark = pytest.mark.processes


def test_every_figure_of_ours_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "out" / "gateway.json"
    command = [sys.executable, str(FOLDER / "gateway" / "gateway_bench.py"), "--out", str(out), "--rounds", "1"]
    scaled = ["--streams", "8", "--window-s", "1", "--open-streams", "20"]
    done = subprocess.run([*command, *scaled], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())["results"]["baton"]
    assert 8 * 15 < result["tok_s"] < 8 * 30
    assert result["tok_per_cpu_s"] > 0
    # Prefill takes 50 ms by the script.
    assert result["engine_p50_ms"] >= 50
    assert result["added_p50_ms"] <= result["added_p99_ms"]
    assert "memory per open stream, KB" in done.stdout


def test_an_answer_begins_with_its_opening_and_goes_on_with_the_text() -> None:
    plain, thinking = Script.of(MODEL_DIR, 0.0, 0.0), Script.of(MODEL_DIR, 0.0, 0.0, "<think>")
    count = len(thinking.opening)
    assert [thinking.token_id(position) for position in range(count)] == thinking.opening
    later = range(2 * len(plain.token_ids))
    assert [thinking.token_id(count + position) for position in later] == [plain.token_id(each) for each in later]
    assert load_tokenizer(MODEL_DIR).decode(thinking.opening) == "<think>"


def test_the_upstream_streams_what_litellm_expects(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from loadtest.gateway.gateway_bench import *\n"
        "[port] = free_loopback_ports(1)\n"
        "command = scripted('scripted_upstream.py', 0.01, port)\n"
        "with Running(command, port, '/', Path(sys.argv[2]), dict(os.environ)):\n"
        "    print(port, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(FOLDER.parent), str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        body = json.dumps({"messages": [], "max_tokens": 5, "stream": True}).encode()
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as response:
            lines = response.read().decode().split("\n\n")
        process.communicate()
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"]]
    assert texts == ["Baton", " serves", " large", " language", " models", None]
    assert chunks[-1]["usage"]["completion_tokens"] == 5
