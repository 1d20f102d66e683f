"""How pods end: by SIGTERM, by SIGKILL, or because their engine has ended."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest_asyncio

from baton_proto import serving_pb2 as pb
from tests.models import reference_choices

from .conftest import LOOP, StartWorker
from .decode_client import DecodeClient
from .prompts import make_prompt
from .stack import Stack
from .workers import Worker

LONG = 1_500  # tokens: seconds of decoding


async def probes(pod: Worker) -> tuple[int, int]:
    """Return what /live and /ready answer."""
    port = (await pod.process.logged("ready"))["metrics_port"]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        return (await http.get("/live")).status_code, (await http.get("/ready")).status_code


async def test_a_decode_pod_finishes_what_runs_and_takes_nothing_new(
    llama: Path, prefill: Worker, start_worker: StartWorker
) -> None:
    pod = await start_worker("decode", metrics_port=0)
    prompt = make_prompt(100, seed=500)
    async with DecodeClient(pod) as client:
        running = await client.submit(prompt, prefill, max_tokens=LONG)
        await running.until(lambda answer: len(answer.only) > 1)
        assert await probes(pod) == (200, 200)
        pod.process.send(signal.SIGTERM)
        await pod.process.logged("draining")
        assert await probes(pod) == (200, 503)
        assert (await pod.load()).draining
        refused = await client.submit(make_prompt(20, seed=501), prefill)
        await refused.until(lambda answer: answer.done)
        assert refused.failure is not None
        assert refused.failure.code == pb.Failure.CODE_UNAVAILABLE
        assert not running.done, "nothing ran any more when the pod refused"
        await running.finished()
        assert await pod.process.ended() == 0
    assert len(running.only) == LONG
    assert running.only[:100] == reference_choices(llama, prompt, running.only[:100])
    await prefill.idle()


async def test_a_prefill_pod_finishes_what_it_was_asked_for(decode: Worker, start_worker: StartWorker) -> None:
    pod = await start_worker("prefill", max_num_batched_tokens=1)
    async with DecodeClient(decode) as client:
        running = await client.submit(make_prompt(LONG, seed=502), pod, max_tokens=4)
        await pod.until(lambda load: load.running)
        pod.process.send(signal.SIGTERM)
        await pod.process.logged("draining")
        refused = await client.ask(make_prompt(100, seed=503), pod)
        assert not running.done
        await running.finished()
        assert await pod.process.ended() == 0
    assert running.prompt is not None
    assert running.prompt.disaggregated
    assert refused.prompt is not None
    assert not refused.prompt.disaggregated
    assert (running.failed_prefills, refused.failed_prefills) == ([], [pod.address])
    await decode.idle()


async def test_idle_pods_end_at_once(start_worker: StartWorker) -> None:
    pods = await asyncio.gather(start_worker("prefill"), start_worker("decode"))
    for pod in pods:
        pod.process.send(signal.SIGTERM)
    assert [await pod.process.ended(timeout_s=5) for pod in pods] == [0, 0]


async def test_what_outlasts_the_grace_period_is_handed_back(
    llama: Path, decode: Worker, prefill: Worker, start_worker: StartWorker
) -> None:
    """A gateway then lets it go on elsewhere; this pod holds nothing of it any more."""
    pod = await start_worker("decode", drain_seconds=0.2)
    prompt, sampling = make_prompt(20, seed=504), {"max_tokens": 1_500, "n": 2, "temperature": 1.0, "seed": 3}
    async with DecodeClient(pod) as client, DecodeClient(decode) as other:
        running = await client.submit(prompt, prefill, **sampling)
        await running.until(lambda answer: all(answer.tokens.values()))
        pod.process.send(signal.SIGTERM)
        await running.until(lambda answer: answer.done)
        assert running.failure is not None
        assert running.failure.code == pb.Failure.CODE_UNAVAILABLE
        assert await pod.process.ended(timeout_s=5) == 0
        whole = await other.ask(prompt, **sampling)
        for choice, begun in running.tokens.items():
            rest = await other.ask(prompt, prefill, continuing=(choice, begun), **{**sampling, "n": 1})
            assert [*begun, *rest.tokens[choice]] == whole.tokens[choice]
    await asyncio.gather(decode.idle(), prefill.idle())


async def test_a_prefill_pod_hands_back_what_outlasts_its_grace_period(
    llama: Path, decode: Worker, prefill: Worker, start_worker: StartWorker
) -> None:
    slow = await start_worker("prefill", max_num_batched_tokens=1, drain_seconds=0.2)
    prompt = make_prompt(LONG, seed=505)
    async with DecodeClient(decode) as client:
        running = await client.submit(prompt, slow, prefill, max_tokens=4)
        await slow.until(lambda load: load.running)
        slow.process.send(signal.SIGTERM)
        assert await slow.process.ended(timeout_s=5) == 0
        await running.finished()
    assert running.prompt is not None
    assert running.prompt.disaggregated
    assert running.failed_prefills == [slow.address]
    assert running.only == reference_choices(llama, prompt, running.only)
    await asyncio.gather(decode.idle(), prefill.idle())


async def test_an_engine_that_hangs_ends_with_its_pod(start_worker: StartWorker) -> None:
    for pod in await asyncio.gather(*(start_worker(role, engine_timeout_s=1) for role in ("prefill", "decode"))):
        [engine] = psutil.Process(pod.process.pid).children()
        engine.suspend()
        assert await pod.process.ended(timeout_s=10) == 1
        await pod.process.logged("engine_hangs")


async def test_a_pod_that_stood_still_has_no_hanging_engine(start_worker: StartWorker) -> None:
    pod = await start_worker("decode", engine_timeout_s=1)
    pod.freeze()
    await asyncio.sleep(2)
    pod.thaw()
    await asyncio.sleep(1.5)
    assert pod.process.alive
    await pod.idle()


async def test_a_pod_ends_with_its_engine(start_worker: StartWorker) -> None:
    for pod in await asyncio.gather(start_worker("prefill"), start_worker("decode")):
        [engine] = psutil.Process(pod.process.pid).children()
        engine.kill()
        assert await pod.process.ended(timeout_s=10) == 1
        assert (await pod.process.logged("fatal"))["message"] == "the engine process ended with status -9"


async def test_an_engine_ends_with_its_pod(start_worker: StartWorker) -> None:
    pod = await start_worker("decode")
    [engine] = psutil.Process(pod.process.pid).children()
    pod.process.send(signal.SIGKILL)
    await pod.process.ended()
    await asyncio.to_thread(psutil.wait_procs, [engine], timeout=10)
    assert not engine.is_running()


@pytest_asyncio.fixture(loop_scope=LOOP, scope="module")
async def own_stack(llama: Path) -> AsyncIterator[Stack]:
    stack = await Stack.start(llama, "--num-blocks", "512")
    yield stack
    await stack.stop()


async def served(stack: Stack, folder: Path, seed: int) -> None:
    """Ask until an answer comes; it must be right, and a refusal a retryable one."""
    prompt = make_prompt(60, seed)

    async def ask() -> httpx.Response:
        return await stack.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)

    async with asyncio.timeout(30):
        while (response := await ask()).status_code == 503:
            assert int(response.headers["retry-after"]) <= 60
            await asyncio.sleep(0.1)
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["token_ids"]
    assert tokens == reference_choices(folder, prompt, tokens)


async def restarted(stack: Stack, name: str, after: int) -> None:
    await stack.process.wrote(lambda line: line["message"].split() == [name, "ready"], 30, after)


async def test_a_killed_worker_comes_back(own_stack: Stack, llama: Path) -> None:
    for role in ("decode", "prefill"):
        [worker] = own_stack.processes(role)
        lines = len(own_stack.process.lines)
        worker.kill()
        await served(own_stack, llama, seed=510)
        await restarted(own_stack, role, lines)
        [successor] = own_stack.processes(role)
        assert successor.pid != worker.pid
        [pod] = own_stack.pods("prefill")
        async with asyncio.timeout(20):
            # The gateway has found the new pod when that has something to do.
            seed = 511
            while not (await pod.load()).prefix_queries:
                await served(own_stack, llama, seed)
                seed += 1
    await own_stack.idle()


async def test_a_worker_comes_back_after_its_engine_was_killed(own_stack: Stack, llama: Path) -> None:
    for role in ("decode", "prefill"):
        [worker] = own_stack.processes(role)
        [engine] = worker.children()
        lines = len(own_stack.process.lines)
        engine.kill()
        await restarted(own_stack, role, lines)
        assert [process.pid for process in own_stack.processes(role)] != [worker.pid]
        await served(own_stack, llama, seed=540)
    await own_stack.idle()


async def test_a_stream_outlives_its_only_decode_pod(own_stack: Stack, llama: Path) -> None:
    """It goes on when the pod is back, and the client has every token once."""
    prompt = make_prompt(20, 550)
    body = {"model": own_stack.model, "prompt": prompt, "max_tokens": 1_000, "ignore_eos": True, "temperature": 0}
    tokens: list[int] = []
    ends = []
    [decode] = own_stack.processes("decode")
    killed = False
    lines = len(own_stack.process.lines)
    async with own_stack.http.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}
    ) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                tokens += choice.get("token_ids", [])
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            if len(tokens) > 5 and not killed:
                decode.kill()
                killed = True
    assert killed
    assert len(tokens) == 1_000
    assert tokens == reference_choices(llama, prompt, tokens)
    assert ends == ["length"]
    await restarted(own_stack, "decode", lines)
    await served(own_stack, llama, seed=551)
    await own_stack.idle()


async def test_ctrl_c_ends_everything(llama: Path) -> None:
    stack = await Stack.start(llama)
    processes = list(stack.all_processes().values())
    assert len(processes) == 5
    stack.process.send(signal.SIGINT)
    assert await stack.process.ended() == 0
    assert not any(process.is_running() for process in processes)
    await stack.stop()
