"""Answers that the gateway keeps until their end: their memory is bounded, and they are written in parts."""

import asyncio
import gc
import json
import time
from pathlib import Path

import httpx
import pytest
import yaml
from tokenizers import Tokenizer

from baton_gateway.answers.choice import Piece
from baton_gateway.answers.reply import WRITE_BYTES, _free, _grouped
from baton_gateway.answers.response_output import MessageOutput
from baton_gateway.answers.response_shape import ResponseShape
from baton_gateway.models.tokenizer import ModelTokenizer
from baton_gateway.requests.response_body import ResponseRequest
from baton_gateway.tenancy.keys import make_key
from baton_gateway.web.body import parse_body
from baton_proto import serving_pb2 as pb

from .fake_worker import hang
from .harness import Stack, error_of, pods, response_events, running

LOGPROBS = {"include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(("fields", "fits"), [({"n": 2}, 8), ({"n": 1, "logprobs": 0}, 2)])
async def test_an_answer_that_is_kept_until_its_end_is_bounded(stack: Stack, monkeypatch, fields, fits: int):
    monkeypatch.setattr("baton_gateway.answers.kept.MAX_KEPT_BYTES", 1600)
    for tokens, status in ((fits, 200), (fits + 1, 400)):
        answer = await stack.complete([7] * 20, max_tokens=tokens, **fields)
        assert answer.status_code == status
    assert (error_of(answer)["param"], error_of(answer)["code"]) == ("stream", "answer_too_large")
    assert (await stack.complete([7] * 20, max_tokens=20, stream=True, **fields)).status_code == 200
    events = response_events(await stack.respond("a long text " * 9, stream=True, **LOGPROBS))
    assert "too long to be kept" in events[-1]["response"]["error"]["message"]


@pytest.mark.processes
async def test_answers_of_one_tenant_are_bounded_together(tmp_path: Path, model_folder: Path, monkeypatch):
    monkeypatch.setattr("baton_gateway.answers.kept.MAX_KEPT_BYTES", 500)
    made = {name: make_key(name) for name in ("greedy", "calm")}
    kept = [{"id": key.id, "hash": key.hash, "tenant": name} for name, (_, key) in made.items()]
    (tmp_path / "tenants").write_text(yaml.safe_dump({"tenants": {name: {} for name in made}, "keys": kept}))
    async with pods() as decodes, running(model_folder, decodes, tenants_file=tmp_path / "tenants") as stack:

        async def send(tenant: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {made[tenant][0]}"}
            body = {"model": "tiny", "prompt": [7] * 5, "max_tokens": 5}
            return await stack.http.post("/v1/completions", json=body, headers=headers)

        echo, stack.pod.script = stack.pod.script, hang(*[7] * 5)
        held = [asyncio.create_task(send("greedy")) for _ in range(4)]
        await stack.until(lambda: sum(stack.gateway.services.replies._kept.values()) == 2000)
        stack.pod.script = echo
        refused = await send("greedy")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "server_is_overloaded")
        assert (await send("calm")).status_code == 200
        for task in held:
            task.cancel()
        await stack.until(lambda: not stack.gateway.services.replies._kept)
        assert (await send("greedy")).status_code == 200


def test_log_probabilities_that_events_repeat_are_never_copied_at_once(tokenizer: Tokenizer):
    shape = ResponseShape({}, MessageOutput("m", ModelTokenizer(tokenizer), True))
    for token in range(100, 300):
        shape.chunk(0, Piece("a", logprobs=[pb.TokenLogprobs(token_id=token, logprob=-1)]), None)
    parts = [*shape._write(shape._output.end("completed"))]
    assert max(map(len, parts)) < 1000
    done, *_ = (json.loads(line[6:]) for line in b"".join(parts).decode().split("\n") if line.startswith("data:"))
    assert len(done["logprobs"]) == 200


@pytest.mark.asyncio
async def test_others_run_while_a_large_answer_is_written_and_freed():
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(other())
    async for _ in _grouped([b"x" * (WRITE_BYTES + 1)] * 5):
        time.sleep(0.003)  # noqa: ASYNC251, more than a slice of time
    assert turns >= 3
    turns = 0
    await _free([Piece(logprobs=[pb.TokenLogprobs() for _ in range(100_000)])])
    task.cancel()
    assert turns >= 3


def test_reasoning_items_take_few_objects():
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}
    body = json.dumps({"model": "tiny", "input": [item] * 1000}).encode()
    before = len(gc.get_objects())
    request = parse_body(body, ResponseRequest)
    assert len(request.input) == 1000
    assert len(gc.get_objects()) - before < 5000
