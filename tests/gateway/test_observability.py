"""Metrics, log lines, /tokenize and the API description."""

from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic.json_schema import models_json_schema as schemas

from baton_gateway.routing.breaker import FAILURES, State
from baton_proto import serving_pb2 as pb
from helm.dashboards.ttft import PARTS

from .fake_worker import say
from .harness import Stack, error_of, pods, running


async def metrics(stack: Stack) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = (await stack.admin("/metrics")).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.processes
async def test_metrics(model_folder):
    async with pods() as decodes, running(model_folder, decodes) as stack:
        stack.pod.cached_tokens = 1
        stack.pod.script = say(stack.ids("lazy dog fox"))
        await stack.complete(stream=True)
        await stack.complete(temperature=9)
        for path in ("/a", "/b", "/c"):
            await stack.http.get(path)
        seen = await metrics(stack)
    prefix = "baton_gateway_"
    model = (("model", "tiny"),)
    tokens = len(stack.ids("lazy dog fox"))
    assert seen[prefix + "requests_total", (("route", "/v1/completions"), ("status", "200"))] == 1
    assert seen[prefix + "requests_total", (("route", "/v1/completions"), ("status", "400"))] == 1
    assert seen[prefix + "requests_total", (("route", "unmatched"), ("status", "404"))] == 3
    assert seen[prefix + "time_to_first_token_seconds_count", model] == 1
    assert 1 <= seen[prefix + "inter_token_latency_seconds_count", model] < tokens
    assert seen[prefix + "e2e_request_latency_seconds_count", (("route", "/v1/completions"),)] == 2
    assert seen[prefix + "generation_tokens_total", model] == tokens
    assert seen[prefix + "prompt_tokens_total", model] == len(stack.pod.jobs[0].prompt)
    assert seen[prefix + "cached_prompt_tokens_total", model] == 1
    pool = ("model", "tiny"), ("pool", "default")
    assert seen[prefix + "live_pods", (*pool, ("role", "decode"))] == 1
    assert seen[prefix + "live_pods", (*pool, ("role", "prefill"))] == 0
    assert seen[prefix + "requests_in_flight", ()] == seen[prefix + "draining", ()] == 0
    assert seen[prefix + "broken_streams_total", model] == 0
    by = {by: seen[prefix + "prefills_total", (("by", by), *model)] for by in ("decode", "prefill")}
    assert by == {"decode": 1, "prefill": 0}
    used = prefix + "tenant_tokens_total"
    assert seen[used, (("kind", "generation"), model[0], ("tenant", "default"))] == tokens
    assert seen[used, (("kind", "prompt"), model[0], ("tenant", "default"))] == len(stack.pod.jobs[0].prompt)
    parts = {labels for name, labels in seen if name == prefix + "ttft_part_seconds_count"}
    assert {dict(labels)["part"] for labels in parts} == set(PARTS)
    # Without Redis there is none to lose.
    assert (prefix + "redis_up", ()) not in seen


@pytest.mark.processes
async def test_what_the_router_decides(model_folder):
    router, model = "baton_gateway_router_", ("model", "tiny")

    def decisions(seen, outcome: str, reason: str) -> float:
        return seen[router + "decisions_total", (model, ("outcome", outcome), ("reason", reason))]

    async with pods() as decodes, pods(role=pb.ROLE_PREFILL) as prefills, running(model_folder, decodes) as stack:
        before = await metrics(stack)
        assert decisions(before, "local", "no_prefill_pods") == decisions(before, "none", "no_decode_pods") == 0
        stack.pod.cached_tokens = 1
        await stack.complete("lazy dog")
        stack.fleet.follow([pod.address for pod in decodes], [pod.address for pod in prefills])
        await stack.until(lambda: all(pod.live for pod in stack.fleet.router.prefills))
        await stack.complete("lazy dog")
        [decode] = stack.fleet.router.decodes
        for _ in range(FAILURES):
            # In an hour, so that the breaker is still open however long the scrape takes.
            decode.breaker.fail(stack.fleet.router._clock() + 3600)
        seen = await metrics(stack)
    assert decisions(seen, "local", "no_prefill_pods") == decisions(seen, "disaggregated", "least_ttft") == 1
    assert seen[router + "decision_seconds_count", (model,)] == 2
    assert seen[router + "cached_tokens_total", (("kind", "predicted"), model)] == 0
    assert seen[router + "cached_tokens_total", (("kind", "actual"), model)] == 2
    pool = (model, ("pool", "default"))
    decode_pods = (*pool, ("role", "decode"))
    states = {state: seen["baton_gateway_breakers", (*decode_pods, ("state", state))] for state in get_args(State)}
    assert states == {"closed": 0, "open": 1, "half_open": 0}
    assert seen["baton_gateway_breakers", (*pool, ("role", "prefill"), ("state", "closed"))] == 1


async def test_what_operators_see(stack: Stack):
    await stack.complete("hello")
    assert (await stack.admin("/live")).status_code == 200
    assert (await stack.admin("/ready")).status_code == 200
    [pod] = (await stack.admin("/pods")).json()["pods"]
    expected = {"model": "tiny", "pool": "default", "role": "decode", "address": stack.pod.address, "live": True}
    assert pod.items() >= {**expected, "revision": "r1", "requests": 0}.items()
    assert pod["dispatched"] > 0
    # Clients see none of it.
    for path in ("/metrics", "/pods"):
        assert (await stack.http.get(path)).status_code == 404


async def test_a_log_line_for_each_request(stack: Stack, caplog):
    caplog.set_level("INFO")
    response = await stack.chat("my secret question", user="secret user")
    refused = await stack.complete("secret", n=0)
    await stack.http.get("/health")
    lines = [record for record in caplog.records if record.message == "request"]
    assert [line.request_id for line in lines] == [r.headers["x-request-id"] for r in (response, refused)]
    answered, error = lines
    usage = response.json()["usage"]
    assert (answered.status, answered.prompt_tokens, answered.completion_tokens) == (
        200,
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert 0 < answered.ttft_ms <= answered.duration_ms
    assert (error.status, error.error) == (400, "invalid_request_error")
    assert "secret" not in repr([vars(record) for record in caplog.records if record.name.startswith("baton")])


async def test_tokenize_and_back(stack: Stack):
    text = "hello 日本 🎊"
    body = (await stack.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    begin = stack.model.tokenizer.token_id("<|begin|>")
    assert body["tokens"] == [begin, *stack.ids(text)]
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == stack.pod.max_model_len
    plain = (await stack.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
    assert plain["tokens"] == stack.ids(text)
    assert (await stack.http.post("/detokenize", json={"tokens": plain["tokens"]})).json() == {"prompt": text}
    chat = await stack.http.post("/tokenize", json={"messages": [{"role": "user", "content": "q"}]})
    assert chat.json()["tokens"] == stack.ids("<|begin|><|user|>q<|end|>\n<|assistant|>")
    assert error_of(await stack.http.post("/tokenize", json={}))["param"] == "prompt"
    assert error_of(await stack.http.post("/tokenize", json={"model": "x", "prompt": ""}))["param"] == "model"


async def test_a_long_text_is_tokenized_off_the_loop(stack: Stack):
    text = "the quick brown fox " * 20_000
    body = (await stack.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
    assert body["tokens"] == stack.ids(text)


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
async def test_the_api_is_described_only_where_that_is_wanted(stack: Stack, path: str):
    response = await stack.http.get(path)
    assert (response.status_code, error_of(response)["message"]) == (404, "There is no such path.")


@pytest.mark.processes
async def test_the_description_has_the_bodies(model_folder, monkeypatch):
    made = []
    monkeypatch.setattr("baton_gateway.web.app.models_json_schema", lambda *a, **b: made.append(a) or schemas(*a, **b))
    async with pods() as decodes, running(model_folder, decodes, docs=True) as stack:
        for _ in range(3):
            schema = (await stack.http.get("/openapi.json")).json()
        assert len(made) == 1, "everybody may ask for it, and to make it takes long"
        for path in ("/docs", "/redoc"):
            assert (await stack.http.get(path)).status_code == 200
    for path, name in (("chat/completions", "ChatCompletionRequest"), ("responses", "ResponseRequest")):
        body = schema["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert "temperature" in schema["components"]["schemas"][name]["properties"]
    items = schema["components"]["schemas"]["ResponseRequest"]["properties"]["input"]
    assert {"$ref": "#/components/schemas/FunctionCallOutput"} in items["anyOf"][1]["items"]["anyOf"]
