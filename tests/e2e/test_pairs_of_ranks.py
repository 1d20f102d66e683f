"""KV from the GPUs of some ranks to those of as many, more or fewer, with sockets in place of NCCL where there are no
four GPUs."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeModel

from .conftest import StartWorker
from .decode_client import DecodeClient
from .prompts import make_prompt
from .test_pairs import PATH, assert_right
from .workers import Worker

pytestmark = pytest.mark.timeout(120)


def logged(worker: Worker, event: str) -> list[dict[str, Any]]:
    return [line for line in worker.process.lines if line.get("event") == event]


async def test_pods_of_one_rank_and_of_two(tiny_model: MakeModel, start_worker: StartWorker) -> None:
    model: Path = tiny_model("llama", max_position_embeddings=2048)
    # Prefill pods have the first GPUs, and decode pods the others.
    first, last = ({"PYTHONPATH": PATH, "CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1,2,3", "2,3,0,1"))
    flags = {"model": model, "max_num_batched_tokens": 48}
    wide_prefill, prefill, wide_decode, decode = await asyncio.gather(
        start_worker("prefill", env=first, tensor_parallel=2, **flags),
        start_worker("prefill", env=first, **flags),
        start_worker("decode", env=last, tensor_parallel=2, **flags),
        start_worker("decode", env=last, **flags),
    )
    routes = [(prefill, wide_decode), (wide_prefill, wide_decode), (wide_prefill, decode)]
    for seed, (source, target) in enumerate(routes):
        pods = source, target
        before, pairs = logged(source, "sent_to_pair"), [len(logged(pod, "paired")) for pod in pods]
        async with DecodeClient(target) as client:
            await client.introduce(source)
            async with asyncio.timeout(20):
                while any(len(logged(pod, "paired")) <= count for pod, count in zip(pods, pairs, strict=True)):
                    await asyncio.sleep(0.05)
            ranks, used, turns = {0} if source is prefill else {0, 1}, set[int](), itertools.count(1_000 * seed)
            # On a busy machine the first prompts may come before a pair is used, and lines of logs after them.
            async with asyncio.timeout(60):
                while used != ranks:
                    for length in (16, 130):
                        prompt = make_prompt(length, seed=next(turns))
                        assert_right(model, prompt, await client.ask(prompt, source, max_tokens=12))
                    used = {line["rank"] for line in logged(source, "sent_to_pair")[len(before) :]}
        await source.idle()
    await asyncio.gather(*(worker.idle() for worker in (wide_prefill, prefill, wide_decode, decode)))
