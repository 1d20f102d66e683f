"""Thousands of requests of every kind, many of them broken off: right answers all along, and nothing left behind."""

import asyncio
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.models import reference_greedy

from .prompts import make_prompt
from .stack import STEP_TOKENS, Stack

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS") or 1_000)
NUM_WINDOWS = 5
IN_FLIGHT = 32
MOST_TOKENS = 24
# Caches grow in jumps; what requests leave behind grows with every window.
LEAK_BYTES = 512 << 10


@dataclass(frozen=True)
class Example:
    """A prompt and what greedy decoding makes of it."""

    prompt: list[int]
    tokens: list[int]
    text: str


class Visitor:
    """Sends requests of all kinds and checks what comes back."""

    def __init__(self, stack: Stack, examples: list[Example], rng: random.Random) -> None:
        self._stack = stack
        self._examples = examples
        self._rng = rng
        self.counts: Counter[str] = Counter()
        kinds = {
            self.whole: 6,
            self.streamed: 6,
            self.chat: 2,
            self.stopped: 2,
            self.sampled: 2,
            self.left_at_once: 2,
            self.left_midway: 4,
            self.invalid: 1,
        }
        self._kinds: list[Callable[[], Awaitable[None]]] = list(kinds)
        self._weights = list(kinds.values())

    async def visit(self, count: int) -> None:
        """Send so many requests, IN_FLIGHT at a time."""
        left = iter(range(count))

        async def one_after_another() -> None:
            for _ in left:
                [kind] = self._rng.choices(self._kinds, self._weights)
                await kind()
                self.counts[kind.__name__] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(one_after_another())

    async def whole(self) -> None:
        example, count, n = self._choose()
        choices = await self._stack.tokens(example.prompt, count, n=n)
        assert choices == [example.tokens[:count]] * n

    async def streamed(self) -> None:
        example, count, n = self._choose()
        got: list[list[int]] = [[] for _ in range(n)]
        async with self._open(example, count, n) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            got[choice["index"]] += choice.get("token_ids", [])
        assert got == [example.tokens[:count]] * n

    async def chat(self) -> None:
        count = self._rng.randint(1, MOST_TOKENS)
        body = {
            "model": self._stack.model,
            "messages": [{"role": "user", "content": "hello " * self._rng.randint(1, 40)}],
            "max_completion_tokens": count,
            "ignore_eos": True,
            "n": self._rng.randint(1, 3),
        }
        response = await self._stack.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == count * body["n"]

    async def stopped(self) -> None:
        example, _, n = self._choose()
        stop = example.text[4:6]
        response = await self._stack.complete(
            example.prompt, max_tokens=MOST_TOKENS, temperature=0, ignore_eos=True, stop=stop, n=n
        )
        for choice in response.json()["choices"]:
            assert (choice["finish_reason"], choice["text"]) == ("stop", example.text[: example.text.index(stop)])

    async def sampled(self) -> None:
        example, count, n = self._choose()
        await self._stack.tokens(example.prompt, count, n=n, temperature=1.0)

    async def left_at_once(self) -> None:
        """The connection closes before the answer's first byte, or about then."""
        example, count, n = self._choose()
        asking = asyncio.create_task(self._stack.tokens(example.prompt, count, n=n))
        await asyncio.wait([asking], timeout=self._rng.uniform(0, 0.03))
        asking.cancel()
        await asyncio.wait([asking])

    async def left_midway(self) -> None:
        example, _, n = self._choose()
        events = self._rng.randint(1, MOST_TOKENS)
        async with self._open(example, 400, n) as response:
            async for line in response.aiter_lines():
                events -= line.startswith("data: ")
                if not events:
                    break

    async def invalid(self) -> None:
        fields = self._rng.choice([{"prompt": []}, {"prompt": [10**6]}, {"max_tokens": 10**6}, {"n": 0}, {"seed": "x"}])
        response = await self._stack.complete(**{"prompt": [1], **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] in (*fields, "prompt")

    def _choose(self) -> tuple[Example, int, int]:
        return self._rng.choice(self._examples), self._rng.randint(1, MOST_TOKENS), self._rng.choice([1, 1, 1, 2, 3])

    def _open(self, example: Example, count: int, n: int) -> AbstractAsyncContextManager[httpx.Response]:
        body = {
            "model": self._stack.model,
            "prompt": example.prompt,
            "max_tokens": count,
            "n": n,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        return self._stack.http.stream("POST", "/v1/completions", json=body)


async def make_examples(stack: Stack, folder: Path) -> list[Example]:
    examples = []
    for index, length in enumerate([1, 5, 15, 16, 17, 40, 64, 100, 130, 200, 300, 400]):
        prompt = make_prompt(length, seed=900 + index)
        response = await stack.complete(prompt, max_tokens=MOST_TOKENS, temperature=0, ignore_eos=True)
        tokens = reference_greedy(folder, prompt, MOST_TOKENS)
        examples.append(Example(prompt, tokens, response.json()["choices"][0]["text"]))
    return examples


async def take_every_step_size(stack: Stack) -> None:
    """Make both engines take steps of 1 to STEP_TOKENS rows, all prompt and all choices.

    oneDNN keeps what it built for a matrix product of so many rows: up to some MiB for each size it meets, for good.
    """
    for rows in range(1, STEP_TOKENS + 1):
        await stack.tokens(make_prompt(rows, seed=2_000 + rows), 3, n=rows)
        await stack.complete([[token] for token in range(rows)], max_tokens=1)


def resident_bytes(stack: Stack) -> dict[str, int]:
    return {name: process.memory_info().rss for name, process in stack.all_processes().items()}


@pytest.mark.soak
@pytest.mark.timeout(240 + NUM_REQUESTS // 10)
async def test_soak(stack: Stack, llama: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.randrange(10**6))
    print(f"SOAK_SEED={seed}")
    examples = await make_examples(stack, llama)
    await take_every_step_size(stack)
    visitor = Visitor(stack, examples, random.Random(seed))
    await stack.idle()
    pids = {name: process.pid for name, process in stack.all_processes().items()}
    leaks = await growing_processes(stack, visitor)
    # A process may also grow until it has met every shape, which takes longer where other work delays its steps. A leak
    # goes on.
    if leaks:
        leaks &= await growing_processes(stack, visitor)
    assert {name: process.pid for name, process in stack.all_processes().items()} == pids, "a process was restarted"
    assert not leaks


async def growing_processes(stack: Stack, visitor: Visitor) -> set[str]:
    """Return the processes that grow by more than LEAK_BYTES from each window of requests to the next."""
    sizes = []
    for _ in range(NUM_WINDOWS):
        await visitor.visit(NUM_REQUESTS // NUM_WINDOWS)
        await stack.idle()
        sizes.append(resident_bytes(stack))
    growth = {name: [after[name] - before[name] for before, after in itertools.pairwise(sizes)] for name in sizes[0]}
    print(
        dict(visitor.counts), {name: [f"{size / 2**20:+.1f} MiB" for size in grown] for name, grown in growth.items()}
    )
    return {name for name, grown in growth.items() if min(grown) > LEAK_BYTES}
