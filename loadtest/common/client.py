"""A load of requests of exact lengths on one OpenAI completions server, sent by the client of `baton bench`."""

import asyncio
import random
import time
from dataclasses import dataclass
from itertools import islice

from baton_bench.answer import Answer
from baton_bench.arrivals import gamma_arrivals
from baton_bench.dialect import Conversation, Dialect
from baton_bench.endpoint import Endpoint
from baton_bench.prompts import PromptMaker
from baton_bench.target import Target

_TIMEOUT_S = 120.0
_HIGHEST_TOKEN = 30_000


@dataclass(frozen=True)
class Load:
    """`count` requests with fixed numbers of tokens in and out, `concurrency` of them at a time. With a `rate`,
    requests arrive at random (Poisson) at that many a second instead, independent of the server. With `least`, prompts
    have from `least` to `inputs` tokens."""

    key: str
    name: str
    inputs: int
    outputs: int
    count: int
    rate: float = 0.0
    concurrency: int = 1
    least: int = 0

    def lengths(self, seed: int) -> list[int]:
        """Return the tokens of each prompt."""
        rng, least = random.Random(seed), self.least or self.inputs
        return [rng.randint(least, self.inputs) for _ in range(self.count)]


async def drive(host: str, port: int, load: Load, seed: int, vocab: int, key: str = "none") -> list[Answer]:
    """Put a load on the server and return its answers, whose times count from now.

    Prompts are random token ids below `vocab`. An answer that failed, or that has not exactly load.outputs tokens, has
    an `error`.
    """
    highest = min(_HIGHEST_TOKEN, vocab - 1)
    url = f"http://{host}:{port}"
    dialect = Dialect("m", "ids", exact=True, token_ids=False, temperature=0.6)
    target = Target("server", url, Endpoint.parse(url, key), dialect, highest, max_model_len=None, by_token=True)
    prompts = PromptMaker(str(seed), highest)
    # Requests are encoded in advance, because encoding a long prompt takes longer than sending it.
    lengths = enumerate(load.lengths(seed))
    requests = [_Request(target, prompts.random(number, length), load.outputs) for number, length in lengths]
    began = time.perf_counter()
    if load.rate:
        arrivals = gamma_arrivals(load.rate, 1.0, random.Random(seed))
        async with asyncio.TaskGroup() as group:
            for due, request in zip(islice(arrivals, load.count), requests, strict=True):
                await asyncio.sleep(max(began + due - time.perf_counter(), 0))
                group.create_task(request.send(began, due))
    else:
        left = iter(requests)

        async def send_next() -> None:
            for request in left:
                await request.send(began, time.perf_counter() - began)

        await asyncio.gather(*(send_next() for _ in range(load.concurrency)))
    return [request.answer for request in requests]


class _Request:
    def __init__(self, target: Target, prompt: list[int], outputs: int) -> None:
        self.answer = Answer(0.0, len(prompt), outputs)
        self._target = target
        self._conversation = Conversation("ids")
        self._conversation.say(prompt)
        self._bytes = target.request(self._conversation, self.answer)

    async def send(self, began: float, due: float) -> None:
        self.answer.due = due
        await self._target.send(self._bytes, self._conversation, self.answer, began, _TIMEOUT_S)
