"""Limits as clients meet them: real HTTP in front, a real Redis behind, scripted pods."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis.asyncio import Redis

from baton_gateway.tenancy.quota import duration
from baton_proto import serving_pb2 as pb
from tests.gateway.fake_worker import FakePod, hang, say
from tests.gateway.harness import Stack, pods, running
from tests.gateway.test_observability import metrics
from tests.tenant_keys import write_tenants

from .conftest import RedisServer

Limited = dict[str, Any]

pytestmark = pytest.mark.processes


class House:
    """Gateways before one pod, with a key for each tenant."""

    def __init__(self, stacks: list[Stack], keys: dict[str, str]) -> None:
        self.stacks = stacks
        self.keys = keys

    async def ask(self, tenant: str, at: int = 0, **fields: Any) -> Any:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, **fields}
        return await self.stacks[at].http.post("/v1/completions", json=body, headers=headers)


@asynccontextmanager
async def house(
    folder: Path, model: Path, tenants: dict[str, Limited], gateways: int = 1, **settings: Any
) -> AsyncIterator[House]:
    headers = write_tenants(file := folder / "tenants.yaml", tenants)
    async with AsyncExitStack() as open:
        decodes: list[FakePod] = await open.enter_async_context(pods())
        stacks = [
            await open.enter_async_context(running(model, decodes, tenants_file=file, **settings))
            for _ in range(gateways)
        ]
        yield House(stacks, {name: header["authorization"].split()[1] for name, header in headers.items()})


async def redis_up(stack: Stack) -> float:
    return (await metrics(stack))["baton_gateway_redis_up", ()]


async def test_what_tenants_use_is_measured(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"requests_per_minute": 1, "max_streams": 7}, "b": {}}) as it:
        [stack] = it.stacks
        for name in ("a", "a", "b"):
            await it.ask(name)
        await stack.until(lambda: not stack.gateway.quota.in_flight())
        seen = await metrics(stack)
    prefix = "baton_gateway_tenant_"
    requests = {("a", "200"): 1, ("a", "429"): 1, ("b", "200"): 1}
    for (name, status), count in requests.items():
        assert seen[prefix + "requests_total", (("status", status), ("tenant", name))] == count
    # The one that was refused used none.
    assert seen[prefix + "tokens_total", (("kind", "prompt"), ("model", "tiny"), ("tenant", "a"))] == 3
    limits = {labels: value for (name, labels), value in seen.items() if name == prefix + "limit"}
    assert limits == {
        (("limit", "requests_per_minute"), ("tenant", "a")): 1,
        (("limit", "max_streams"), ("tenant", "a")): 7,
    }


async def test_what_is_refused_for_our_own_sake_costs_no_tokens(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"tokens_per_minute": 100}}, ttft_slo_s=1) as it:
        [stack] = it.stacks
        first = await it.ask("a")
        [pod] = stack.fleet.router.decodes
        stack.pod.load = pb.WorkerLoad(queued_prefill_tokens=10**6)
        await stack.until(lambda: pod.prefill_tokens.reported)
        assert (await it.ask("a")).status_code == 503
        stack.pod.load = pb.WorkerLoad()
        await stack.until(lambda: not pod.prefill_tokens.reported)
        later = await it.ask("a")
        left = [int(answer.headers["x-ratelimit-remaining-tokens"]) for answer in (first, later)]
        # What the first one took, but for what has leaked away meanwhile.
        assert left[0] - left[1] <= 7


async def test_requests_per_minute(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"requests_per_minute": 3}, "b": {}}) as it:
        answers = [await it.ask("a") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
        refused = answers[-1]
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
        assert 15 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert refused.headers["x-ratelimit-reset-requests"] in ("59s", "1m0s")
        other = await it.ask("b")
        assert other.status_code == 200
        assert "x-ratelimit-limit-requests" not in other.headers


async def test_what_was_not_used_comes_back(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"tokens_per_minute": 500}}) as it:
        first = await it.ask("a", max_tokens=400)
        used = first.json()["usage"]["total_tokens"]
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == 500 - 403
        await it.stacks[0].until(lambda: not it.stacks[0].gateway.quota._settling)
        second = await it.ask("a", max_tokens=400)
        assert second.status_code == 200
        assert int(second.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(500 - used - 403, abs=10)


async def test_tokens_that_a_client_does_not_read_are_counted(tmp_path: Path, model_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("baton_gateway.generation.answer_memory.MAX_KEPT_BYTES", 10_000)
    async with house(tmp_path, model_folder, {"a": {}}) as it:
        [stack] = it.stacks
        stack.pod.script = say([7] * 101, step=101, finish=pb.FINISH_REASON_LENGTH)
        assert (await it.ask("a", max_tokens=101)).json()["error"]["code"] == "answer_too_large"
        await stack.until(lambda: not stack.gateway.quota.in_flight())
        labels = (("kind", "generation"), ("model", "tiny"), ("tenant", "a"))
        assert (await metrics(stack))["baton_gateway_tenant_tokens_total", labels] == 101


async def test_a_response_is_counted_as_a_chat_is(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"tokens_per_minute": 500}}) as it:
        stack, headers = it.stacks[0], {"authorization": f"Bearer {it.keys['a']}"}
        bodies: dict[str, Any] = {
            "responses": {"model": "tiny", "input": "hello", "max_output_tokens": 400},
            "chat/completions": {
                "model": "tiny",
                "messages": [{"role": "user", "content": "hello"}],
                "max_completion_tokens": 400,
            },
        }
        before, left = 500, {}
        for path, body in bodies.items():
            answer = await stack.http.post(f"/v1/{path}", json=body, headers=headers)
            left[path] = before - int(answer.headers["x-ratelimit-remaining-tokens"])
            before -= answer.json()["usage"]["total_tokens"]
            await stack.until(lambda: not stack.gateway.quota._settling)
        assert left["responses"] == pytest.approx(left["chat/completions"], abs=10)
        refused = await stack.http.post(
            "/v1/responses", json=bodies["responses"] | {"input": "x" * 999}, headers=headers
        )
        assert refused.status_code == 429


async def test_more_tokens_than_the_limit_are_never_allowed(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"tokens_per_minute": 50}}) as it:
        answer = await it.ask("a", max_tokens=60)
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "tokens"
        assert answer.headers["x-should-retry"] == "false"
        assert "63 tokens" in answer.json()["error"]["message"]


LONG = "x" * 9000
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": LONG}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{**USER, "content": LONG, "number": 2**70}]},
        {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": LONG}]},
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
        {"messages": [USER], "documents": [{"text": LONG}]},
        {"messages": [USER], "chat_template_kwargs": {"date": LONG}},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [7] * 4500}}}],
        },
    ],
)
async def test_all_that_a_prompt_may_hold_is_reserved(tmp_path: Path, model_folder: Path, fields: Any) -> None:
    """Otherwise any number of such requests could run at the same time, whatever the limit is."""
    async with house(tmp_path, model_folder, {"a": {"tokens_per_minute": 2000}}) as it:
        headers = {"authorization": f"Bearer {it.keys['a']}"}
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await it.stacks[0].http.post(path, json={"model": "tiny", **fields}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, "tokens")
        assert not it.stacks[0].pod.jobs


async def test_a_budget_that_is_used_up(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"budget_tokens": 10, "budget_period": "day"}}) as it:
        assert (await it.ask("a")).status_code == 200
        await it.stacks[0].until(lambda: not it.stacks[0].gateway.quota._settling)
        answer = await it.ask("a")
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        assert answer.headers["x-should-retry"] == "false"


async def test_streams_at_the_same_time(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"max_streams": 2}}) as it:
        stack = it.stacks[0]
        stack.pod.script, answering = hang(7, 8), stack.pod.script
        held = [asyncio.create_task(it.ask("a", stream=True)) for _ in range(2)]
        await stack.until(lambda: len(stack.gateway.quota._live) == 2)
        assert (await it.ask("a")).status_code == 429
        stack.pod.script = answering
        for task in held:  # the clients leave
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await stack.until(lambda: not stack.gateway.quota._settling and not stack.gateway.quota._live)
        assert (await it.ask("a")).status_code == 200


async def test_models(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"models": ["large"]}, "b": {"models": ["tiny"]}}) as it:
        answer = await it.ask("a")
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("permission_error", "model_not_allowed", "model")
        assert (await it.ask("b")).status_code == 200
        http = it.stacks[0].http
        for tenant, count in (("a", 0), ("b", 1)):
            listed = await http.get("/v1/models", headers={"authorization": f"Bearer {it.keys[tenant]}"})
            assert len(listed.json()["data"]) == count


async def test_two_gateways_on_one_redis_hold_the_same_limits(
    tmp_path: Path, model_folder: Path, redis_server: RedisServer
) -> None:
    limits = {"shared": {"requests_per_minute": 20}}
    async with house(tmp_path, model_folder, limits, gateways=2, redis_url=redis_server.url) as it:
        answers = await asyncio.gather(*(it.ask("shared", at=number % 2) for number in range(40)))
        codes = [answer.status_code for answer in answers]
        assert codes.count(200) == 20
        assert codes.count(429) == 20


@pytest.mark.parametrize("redis_lost", ["local", "refuse"])
async def test_redis_is_lost_and_comes_back(
    tmp_path: Path, model_folder: Path, redis_server: RedisServer, redis_lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {f"lost-{redis_lost}": {"requests_per_minute": 10}}
    [name] = limits
    caplog.set_level("INFO")
    async with house(tmp_path, model_folder, limits, redis_url=redis_server.url, redis_lost=redis_lost) as it:
        assert (await it.ask(name)).status_code == 200
        [stack] = it.stacks
        assert await redis_up(stack)
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            answers = [await it.ask(name) for _ in range(12)]
            await stack.until(lambda: not stack.gateway.tenants.redis_up)
            assert not await redis_up(stack)
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        codes = [answer.status_code for answer in answers]
        assert codes == ([200] * 10 + [429] * 2 if redis_lost == "local" else [503] * 12)
        if redis_lost == "refuse":
            assert "retry-after" in answers[0].headers
        assert caplog.text.count("Redis is lost") == 1
        await asyncio.sleep(1.1)
        back = await it.ask(name)
        assert back.status_code == 200
        # A server that stood still counts what it had been asked, though nobody waits for the answer any more.
        assert back.headers["x-ratelimit-remaining-requests"] in ("7", "8")
        assert caplog.text.count("Redis is back") == 1
        await stack.until(lambda: stack.gateway.tenants.redis_up)


async def test_the_official_client_understands(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"requests_per_minute": 1}}) as it:
        client = openai.AsyncOpenAI(base_url=f"{it.stacks[0].url}/v1", api_key=it.keys["a"], max_retries=0)
        answer = await client.completions.with_raw_response.create(model="tiny", prompt="hello", max_tokens=2)
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="tiny", prompt="hello", max_tokens=2)
        assert caught.value.code == "rate_limit_exceeded"
        await client.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0165, "17ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (61, "1m1s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_tokenizing_is_counted(tmp_path: Path, model_folder: Path) -> None:
    limits = {"a": {"tokens_per_minute": 1000}, "b": {"requests_per_minute": 2}, "c": {"tokens_per_minute": 10}}
    async with house(tmp_path, model_folder, limits) as it:
        [stack] = it.stacks

        async def post(tenant: str, path: str, **body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {it.keys[tenant]}"}
            answer = await stack.http.post(path, json=body, headers=headers)
            await stack.until(lambda: not stack.gateway.quota._settling)
            return answer

        left = 1000.0
        for path, body in (
            ("/tokenize", {"prompt": "hello " * 40}),
            ("/tokenize", {"messages": [{"role": "user", "content": "hello " * 40}]}),
            ("/detokenize", {"tokens": [5] * 100}),
        ):
            answer = await post("a", path, **body)
            assert answer.status_code == 200
            left -= len(body["tokens"]) if "tokens" in body else answer.json()["count"]
            seen = await it.ask("a")
            await stack.until(lambda: not stack.gateway.quota._settling)
            # The request that looks takes its own share before it is told, and some leaks away.
            assert left - 7 <= int(seen.headers["x-ratelimit-remaining-tokens"]) <= left + 40
            left -= seen.json()["usage"]["total_tokens"]
        assert [(await post("b", "/tokenize", prompt="x")).status_code for _ in range(3)] == [200, 200, 429]
        assert (await post("b", "/detokenize", tokens=[1])).status_code == 429
        refused = await post("c", "/detokenize", tokens=[5] * 11)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")


async def test_every_sequence_is_a_stream(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"max_streams": 6}, "b": {}}) as it:
        [stack] = it.stacks
        stack.pod.script, answering = hang(7, 8), stack.pod.script
        held = asyncio.create_task(it.ask("a", prompt=[[1, 2], [3, 4]], n=2, stream=True))
        await stack.until(lambda: len(stack.gateway.quota._live) == 1)
        refused = await it.ask("a", n=2, best_of=3)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "6 sequences at the same time; 3 were asked for" in refused.json()["error"]["message"]
        never = await it.ask("a", prompt=[[1]] * 4, n=2)
        assert (never.status_code, never.headers["x-should-retry"]) == (429, "false")
        assert "8 sequences" in never.json()["error"]["message"]
        stack.pod.script = answering
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await stack.until(lambda: not stack.gateway.quota._settling and not stack.gateway.quota._live)
        assert (await it.ask("a", prompt=[[1]] * 3, n=2)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[1]] * 9}, "prompt"),
        ({"prompt": [[1]] * 3, "n": 3}, "n"),
        ({"n": 9}, "n"),
        ({"n": 1, "best_of": 9}, "best_of"),
    ],
)
async def test_sequences_of_a_request_are_bounded(
    tmp_path: Path, model_folder: Path, fields: dict[str, Any], param: str
) -> None:
    async with house(tmp_path, model_folder, {"a": {}}, max_sequences_per_request=8) as it:
        answer = await it.ask("a", **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "At most 8 sequences" in answer.json()["error"]["message"]
        assert (await it.ask("a", prompt=[[1]] * 4, n=2)).status_code == 200


async def test_who_has_no_requests_left_is_refused_before_the_body_is_read(tmp_path: Path, model_folder: Path) -> None:
    async with house(tmp_path, model_folder, {"a": {"requests_per_minute": 60}}) as it:
        [stack] = it.stacks
        headers = {"authorization": f"Bearer {it.keys['a']}"}

        async def unreadable(path: str = "/v1/completions") -> httpx.Response:
            return await stack.http.post(path, content=b"{", headers=headers)

        assert (await unreadable()).status_code == 400
        # Requests leak away while others are answered.
        answers = [first := await it.ask("a")]
        while first.status_code == 200 and len(answers) < 200:
            answers.append(first := await it.ask("a"))
        assert first.status_code == 429
        assert len(answers) > 60
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
            refused = await unreadable(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 0 < int(refused.headers["retry-after-ms"]) <= int(first.headers["retry-after-ms"])
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        # No longer than it is true: a request leaks away in a second.
        await asyncio.sleep(int(refused.headers["retry-after-ms"]) / 1000)
        assert (await it.ask("a")).status_code == 200
        assert (await it.ask("a")).status_code == 429
        file = tmp_path / "tenants.yaml"
        file.write_text(file.read_text().replace('requests_per_minute":60', 'requests_per_minute":6000'))
        await stack.until(lambda: stack.gateway.tenants.known["a"].requests_per_minute == 6000)
        assert (await unreadable()).status_code == 400


@pytest.mark.parametrize(
    "reply", [b"+OK\r\n", b"$abc\r\n", b"*1\r\n:0\r\n", b"*4\r\n:99\r\n:0\r\n:0\r\n:0\r\n", b"*-5\r\n"]
)
@pytest.mark.parametrize(("redis_lost", "status"), [("local", 200), ("refuse", 503)])
async def test_a_redis_that_sends_nonsense_is_lost(
    tmp_path: Path, model_folder: Path, redis_lost: str, status: int, reply: bytes
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with house(tmp_path, model_folder, {"a": {}}, redis_url=url, redis_lost=redis_lost) as it:
        assert [(await it.ask("a")).status_code for _ in range(2)] == [status] * 2
    server.close()


async def test_one_request_at_a_time_tries_a_lost_redis(
    tmp_path: Path, model_folder: Path, redis_server: RedisServer
) -> None:
    async with house(tmp_path, model_folder, {"tries": {}}, redis_url=redis_server.url) as it:
        quota = it.stacks[0].gateway.quota
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            await it.ask("tries")
            quota._retry_at = 0.0
            unsettled = len(quota._unsettled)
            await asyncio.gather(*(it.ask("tries") for _ in range(20)))
            assert len(quota._unsettled) <= unsettled + 1
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)


async def until_used(redis: "Redis", tenant: str, most: int) -> None:
    """Wait until the tokens counted in Redis are no more than that."""
    async with asyncio.timeout(5):
        while int(await redis.hget(f"baton:{{{tenant}}}:limits", "used") or most + 1) > most:  # type: ignore[misc]
            await asyncio.sleep(0.05)


async def test_a_reservation_whose_answer_was_lost_is_charged_once(
    tmp_path: Path, model_folder: Path, redis_server: RedisServer
) -> None:
    limits = {"charged-once": {"budget_tokens": 10_000, "budget_period": "ever", "max_streams": 5}}
    redis = Redis.from_url(redis_server.url)
    async with house(tmp_path, model_folder, limits, redis_url=redis_server.url) as it:
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            assert (await it.ask("charged-once", max_tokens=100, n=4)).status_code == 200
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        await until_used(redis, "charged-once", 0)
        assert (await it.ask("charged-once", prompt=[1, 2, 3], max_tokens=1)).status_code == 200
        await until_used(redis, "charged-once", 4)
        assert not await redis.zcard("baton:{charged-once}:streams")
    await redis.aclose()


async def test_what_was_used_while_redis_was_lost_is_settled_when_it_is_back(
    tmp_path: Path, model_folder: Path, redis_server: RedisServer
) -> None:
    limits = {"settled-late": {"budget_tokens": 10_000, "budget_period": "ever"}}
    redis = Redis.from_url(redis_server.url)
    async with house(tmp_path, model_folder, limits, redis_url=redis_server.url) as it:
        [stack] = it.stacks
        stack.pod.script = hang(7, 8)
        held = asyncio.create_task(it.ask("settled-late", max_tokens=100, stream=True))
        await stack.until(lambda: stack.pod.jobs)
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            await stack.until(lambda: not stack.gateway.quota._live)
            await stack.until(lambda: not stack.gateway.quota._settling)
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        await until_used(redis, "settled-late", 10)
    await redis.aclose()
