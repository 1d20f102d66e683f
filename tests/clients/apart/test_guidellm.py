"""guidellm: a short benchmark, after which its report is right."""

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from .conftest import KEY, MODEL_FOLDER, Baton

REQUESTS = 6
OUTPUT_TOKENS = 16


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_request_is_counted(baton: Baton, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = tmp_path / "report.json"
    backend = f"kind=openai_http,target={baton.address},model={baton.model},api_key={KEY},request_format={path}"
    subprocess.run(
        [
            *(Path(sys.executable).with_name("guidellm"), "run", "--backend", backend, "--disable-console"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={MODEL_FOLDER}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"),
            *("--output", f"kind=json,path={report}"),
        ],
        check=True,
        timeout=120,
    )
    [benchmark] = json.loads(report.read_bytes())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (REQUESTS, [], [])
    for request in requests["successful"]:
        body = json.loads(request["request_args"])["body"]
        asked = {name: body[name] for name in ("messages", "prompt") if name in body}
        tokens = baton.openai.with_options(base_url=baton.address).post(
            "/tokenize", body={"model": baton.model, **asked}, cast_to=openai.BaseModel
        )
        assert request["prompt_tokens"] == tokens.to_dict()["count"]
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert 0 < request["time_to_first_token_ms"] < request["request_latency"] * 1000
