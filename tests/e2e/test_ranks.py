"""Pods that are divided in different ways hand KV over to each other, and a pod that loses a process ends."""

import asyncio
from pathlib import Path

import psutil

from tests.models import is_greedy

from .conftest import StartWorker
from .decode_client import DecodeClient
from .prompts import make_prompt
from .workers import Worker


async def test_pods_of_one_process_and_of_two(
    llama: Path, prefill: Worker, decode: Worker, start_worker: StartWorker
) -> None:
    wide_prefill, wide_decode = await asyncio.gather(
        start_worker("prefill", max_num_batched_tokens=48, pipeline_parallel=2),
        start_worker("decode", max_num_batched_tokens=48, tensor_parallel=2),
    )
    for seed, (source, target) in enumerate([(prefill, wide_decode), (wide_prefill, decode)]):
        prompts = [make_prompt(length, seed=200 + seed) for length in (16, 130)]
        async with DecodeClient(target) as client:
            answers = [await client.submit(prompt, source, max_tokens=16) for prompt in prompts]
            for prompt, answer in zip(prompts, answers, strict=True):
                assert is_greedy(llama, prompt, (await answer.finished()).only)
                assert answer.prompt is not None
                assert answer.prompt.disaggregated
    for worker in (prefill, decode, wide_prefill, wide_decode):
        await worker.idle()
    children = psutil.Process(wide_prefill.process.pid).children(recursive=True)
    [rank] = [child for child in children if "baton_engine.ranks.process" in child.cmdline()]
    rank.kill()
    assert await wide_prefill.process.ended(timeout_s=5)
    # A decode pod computes what the lost pod would have computed.
    prompt = make_prompt(60, seed=210)
    async with DecodeClient(wide_decode) as client:
        answer = await client.ask(prompt, wide_prefill, max_tokens=16)
    assert is_greedy(llama, prompt, answer.only)
