"""aiperf: a short benchmark, after which its report is right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import KEY, MODEL_FOLDER, Baton

REQUESTS = 10
OUTPUT_TOKENS = 16


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_request_is_counted(baton: Baton, endpoint: str, tmp_path: Path) -> None:
    # Without HF_HUB_OFFLINE: with it aiperf takes no folder for its tokenizer, and without it asks the hub for nothing.
    subprocess.run(
        [
            *(Path(sys.executable).with_name("aiperf"), "profile", "--model", baton.model, "--url", baton.address),
            *("--api-key", KEY, "--endpoint-type", endpoint, "--streaming", "--tokenizer", MODEL_FOLDER),
            *("--request-count", str(REQUESTS), "--concurrency", "2", "--isl", "32", "--osl", str(OUTPUT_TOKENS)),
            *("--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--random-seed", "1"),
            *("--ui", "none", "--artifact-dir", tmp_path),
        ],
        check=True,
        timeout=120,
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_bytes())
    assert (report["request_count"]["avg"], report["error_summary"], report["is_complete"]) == (REQUESTS, [], True)
    records = [json.loads(line) for line in (tmp_path / "profile_export.jsonl").read_text().splitlines()]
    assert len(records) == REQUESTS
    for record in records:
        metrics = {name: metric["value"] for name, metric in record["metrics"].items()}
        assert record.get("error") is None
        assert metrics["usage_completion_tokens"] == OUTPUT_TOKENS
        # A chat template, or the special tokens of a text, add some.
        assert 32 <= metrics["usage_prompt_tokens"] <= 40
        assert metrics["usage_total_tokens"] == metrics["usage_prompt_tokens"] + OUTPUT_TOKENS
        # A busy client reads a whole answer at once: its first token is then as late as its last.
        assert 0 < metrics["time_to_first_token"] <= metrics["request_latency"]
