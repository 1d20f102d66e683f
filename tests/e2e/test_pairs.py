"""KV from GPU to GPU, with sockets in place of NCCL where there are no GPUs (paired/sitecustomize.py): whatever happens
to the connection between two engines, answers are right, nothing stays behind, and KV goes on by another way."""

import asyncio
import os
from pathlib import Path

import pytest

from baton_engine.models.registry import load_model_config
from tests.models import is_greedy

from .conftest import StartWorker
from .decode_client import Answer, DecodeClient
from .prompts import make_prompt
from .workers import Worker

PATH = os.pathsep.join([str(Path(__file__).parent / "paired"), os.environ.get("PYTHONPATH", "")])


async def start_pair(start_worker: StartWorker, fault: str = "", checks: bool = True) -> tuple[Worker, Worker]:
    """Start a prefill and a decode pod whose engines can be a pair."""
    env = {"PYTHONPATH": PATH, "PAIR_FAULT": fault, "BATON_KV_GPU_CHECKSUM": str(checks)}
    return await asyncio.gather(
        # Each with a GPU of its own, where there are two; NCCL wants to see the other's, too.
        start_worker("prefill", env={**env, "CUDA_VISIBLE_DEVICES": "0,1"}, max_num_batched_tokens=48),
        start_worker("decode", env={**env, "CUDA_VISIBLE_DEVICES": "1,0"}),
    )


async def paired(client: DecodeClient, prefill: Worker, decode: Worker) -> None:
    await client.introduce(prefill)
    await asyncio.gather(decode.process.logged("paired"), prefill.process.logged("paired"))


def sent(prefill: Worker) -> list[int]:
    """Return the bytes of each message that the prefill engine has sent to the other."""
    return [line["bytes"] for line in prefill.process.lines if line.get("event") == "sent_to_pair"]


def kv_bytes(folder: Path, tokens: int) -> int:
    config = load_model_config(folder)
    return tokens * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4


def assert_right(folder: Path, prompt: list[int], answer: Answer, other_pod: bool | None = True) -> None:
    for tokens in answer.tokens.values():
        assert is_greedy(folder, prompt, tokens), tokens
    assert answer.prompt is not None
    assert other_pod is None or answer.prompt.disaggregated == other_pod


@pytest.mark.parametrize("checks", [True, False])
async def test_kv_goes_from_engine_to_engine(llama: Path, start_worker: StartWorker, checks: bool) -> None:
    prefill, decode = await start_pair(start_worker, checks=checks)
    async with DecodeClient(decode) as client:
        await paired(client, prefill, decode)
        prompts = [make_prompt(length, seed=length) for length in (3, 48, 150, 700)]
        answers = [await client.submit(prompt, prefill, n=2) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            await answer.finished()
            assert_right(llama, prompt, answer)
    await asyncio.gather(prefill.idle(), decode.idle())
    # All KV, in several pieces for a long prompt: how many, says the speed of the engine.
    assert sum(sent(prefill)) == kv_bytes(llama, 901)
    assert len(sent(prefill)) > len(prompts)
    load = await decode.load()
    assert load.handover_events == {}
    assert load.handed_over_tokens == 901
    assert 0 < load.exposed_handover_s < 60


async def test_requests_end_while_pieces_are_under_way(llama: Path, start_worker: StartWorker) -> None:
    """What was announced is received and thrown away, so that what follows still fits."""
    prefill, decode = await start_pair(start_worker)
    async with DecodeClient(decode) as client:
        await paired(client, prefill, decode)
        for seed in range(12):
            answer = await client.submit(make_prompt(600, seed=seed), prefill)
            await asyncio.sleep(0.03 * seed)
            await client.cancel(answer)
        prompt = make_prompt(300, seed=99)
        assert_right(llama, prompt, await client.ask(prompt, prefill))
    await asyncio.gather(prefill.idle(), decode.idle())


async def test_a_damaged_piece_is_refused(llama: Path, start_worker: StartWorker) -> None:
    prefill, decode = await start_pair(start_worker, "damage:2")
    prompt = make_prompt(150, seed=1)
    async with DecodeClient(decode) as client:
        await paired(client, prefill, decode)
        # The prefill pod may have told the first token before that was noticed.
        assert_right(llama, prompt, await client.ask(prompt, prefill), other_pod=None)
        events = (await decode.load()).handover_events
        # What was on its way behind it may find its ticket closed, or its blocks given back.
        events = {name: count for name, count in events.items() if name not in ("refused_ticket", "refused_stale")}
        assert events == {"refused_checksum": 1, "failed": 1}
        again = make_prompt(150, seed=2)
        assert_right(llama, again, await client.ask(again, prefill))
    await asyncio.gather(prefill.idle(), decode.idle())


@pytest.mark.parametrize("fault", ["break:3", "stall:3"])
async def test_the_connection_is_lost(llama: Path, start_worker: StartWorker, fault: str) -> None:
    prefill, decode = await start_pair(start_worker, fault)
    prompt = make_prompt(400, seed=3)
    async with DecodeClient(decode) as client:
        await paired(client, prefill, decode)
        answer = await client.submit(prompt, prefill)
        await answer.finished(timeout_s=20)
        # By then the prefill pod may have computed all, and told the first token.
        assert_right(llama, prompt, answer, other_pod=None)
        line = await decode.process.logged("transport_fallback")
        assert prefill.address in line["message"]
        after = make_prompt(400, seed=4)
        assert_right(llama, after, await client.ask(after, prefill))
    await asyncio.gather(prefill.idle(), decode.idle())
    # Two by each connection before its fault: a link that was lost too is made anew, with another one.
    assert 2 <= len(sent(prefill)) <= 4


async def test_without_a_connection_kv_comes_as_before(llama: Path, start_worker: StartWorker) -> None:
    prefill, decode = await start_pair(start_worker, "refuse")
    prompt = make_prompt(150, seed=5)
    async with DecodeClient(decode) as client:
        await client.introduce(prefill)
        await decode.process.logged("transport_fallback")
        assert_right(llama, prompt, await client.ask(prompt, prefill))
    await asyncio.gather(prefill.idle(), decode.idle())
    assert not sent(prefill)


async def test_a_prefill_pod_wakes_up_and_goes_on_sending(llama: Path, start_worker: StartWorker) -> None:
    """The blocks that it was to fill belong to others by then: not one byte of it gets there."""
    (prefill, decode), second = await asyncio.gather(start_pair(start_worker), start_worker("prefill"))
    prompt = make_prompt(1_500, seed=6)
    async with DecodeClient(decode) as client:
        await paired(client, prefill, decode)
        answer = await client.submit(prompt, prefill, second)
        await prefill.process.logged("sent_to_pair")
        prefill.freeze()
        try:
            await answer.finished(timeout_s=30)
            assert_right(llama, prompt, answer)
            others = [make_prompt(500, seed=seed) for seed in range(7, 12)]
            going = [await client.submit(other, max_tokens=200) for other in others]
        finally:
            prefill.thaw()
        for other, each in zip(others, going, strict=True):
            await each.finished()
            assert_right(llama, other, each, other_pod=False)
    await asyncio.gather(prefill.idle(), decode.idle(), second.idle())


async def test_the_prefill_pod_is_killed(llama: Path, start_worker: StartWorker) -> None:
    # Its third piece never arrives, so that not all KV is there when it is killed.
    prefill, decode = await start_pair(start_worker, "stall:3")
    prompt = make_prompt(1_500, seed=13)
    async with DecodeClient(decode) as client:
        await paired(client, prefill, decode)
        answer = await client.submit(prompt, prefill)
        await prefill.process.logged("sent_to_pair")
        await prefill.kill()
        await answer.finished()
        assert (await decode.load()).handover_events == {"failed": 1}
    # By then it may have told the first token.
    assert_right(llama, prompt, answer, other_pod=None)
    await decode.idle()
