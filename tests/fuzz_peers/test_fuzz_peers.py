"""Odd messages at every port of the workers change nothing: FUZZ_MESSAGES of them, repeatable by FUZZ_SEED.

A GPU pair's announcements come through the same headers (messages.Odd.announcement); pods without a GPU refuse them.
"""

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import psutil
import pytest
import pytest_asyncio

from baton_common.peer_token import PeerToken
from tests.conftest import MakeModel
from tests.e2e.pod import Pod
from tests.e2e.stack import Stack
from tests.peer_files import write_tokens

from .attackers import (
    BrokenPrefill,
    broken_decode_pod,
    broken_gateway,
    broken_prefill,
    raw_bytes,
    single_requests,
    stranger,
)
from .messages import Odd

MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "2500"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
TOKEN = "fuzz-token-0123456789"
NUM_ATTACKERS = 6
# Of each process between the parts of the messages that are compared. A leak of 2 KiB a message shows at 100,000.
MOST_GROWTH_BYTES = 64 << 20
# Odd requests lead to steps of many sizes. With as few kernels kept, these caches are full before growth is measured.
# With one arena, malloc gives back what is free, so that the size of a process says what it holds.
SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64", "MALLOC_ARENA_MAX": "1"}
PROMPTS = [[(seed * 37 + 7 * index) % 500 for index in range(20 + 30 * seed)] for seed in range(4)]

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.soak,
    pytest.mark.timeout(max(300, MESSAGES // 20)),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tiny_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tiny_model("llama", rope="llama3", num_key_value_heads=1, max_position_embeddings=2048)
    file = write_tokens(tmp_path_factory.mktemp("token") / "tokens", TOKEN)
    flags = ("--num-blocks", "512", "--max-num-batched-tokens", "256")
    stack = await Stack.start(folder, *flags, env={"BATON_PEER_TOKEN_FILE": str(file), **SMALL_CACHES})
    stack.token_file = file  # type: ignore[attr-defined]
    yield stack
    await stack.stop()


class Attack:
    """Sends messages from several connections at a time."""

    def __init__(self, stack: Stack, decode: Pod, prefill: Pod, fingerprint: str, broken: list[BrokenPrefill]) -> None:
        self.sent: Counter[str] = Counter()
        self._decode, self._prefill, self._fingerprint, self._broken = decode, prefill, fingerprint, broken
        self._prefills = [prefill.address, *(pod.address for pod in broken), "127.0.0.1:1", decode.address]

    @property
    def total(self) -> int:
        return self.sent.total() + sum(pod.sent for pod in self._broken)

    async def until(self, total: int) -> None:
        await asyncio.gather(*(self._attack(number, total) for number in range(NUM_ATTACKERS)))

    async def _attack(self, number: int, total: int) -> None:
        seeds = random.Random(f"{SEED}-{number}-{total}")
        while self.total < total:
            odd = Odd(seeds.getrandbits(64), 512, 2048)
            pod = odd.random.choice([self._decode, self._prefill])
            host, port = pod.address.split(":")
            match odd.random.choices(["gateway", "decode", "raw", "single", "stranger"], [45, 45, 5, 3, 2])[0]:
                case "gateway":
                    self.sent["gateway"] += await broken_gateway(self._decode, odd, self._prefills)
                case "decode":
                    self.sent["decode"] += await broken_decode_pod(self._prefill, odd, self._fingerprint)
                case "raw":
                    ports = [int(port), *bulk_ports(self._prefill)]
                    self.sent["raw"] += await raw_bytes(host, odd.random.choice(ports), odd)
                case "single":
                    self.sent["single"] += await single_requests(pod, odd)
                case _:
                    self.sent["stranger"] += await stranger(pod, odd, odd.random.choice([None, "x" * 20]))


def bulk_ports(prefill: Pod) -> list[int]:
    """Return the ports on which the process of a prefill pod listens, its gRPC port included."""
    port = int(prefill.address.split(":")[1])
    for process in psutil.process_iter():
        try:
            ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
        if port in ports:
            return ports
    return [port]


async def ask(stack: Stack, number: int) -> list[list[int]]:
    return await stack.tokens(PROMPTS[number], 12)


async def client(stack: Stack, expected: list[list[list[int]]], answered: Counter[str]) -> None:
    """Ask again and again; every answer must be whole and right."""
    for number in itertools.cycle(range(len(PROMPTS))):
        assert await ask(stack, number) == expected[number]
        answered["right"] += 1
        await asyncio.sleep(0.02)


def lows(sizes: list[dict[str, int]]) -> dict[str, int]:
    """Return the smallest size of each process."""
    return {name: min(each.get(name, size) for each in sizes) for name, size in sizes[0].items()}


def memory(stack: Stack) -> dict[str, int]:
    return {name: process.memory_info().rss for name, process in stack.all_processes().items()}


def connections(stack: Stack) -> int:
    """Count those of workers, except to this process: its gRPC clients keep connections for a while."""
    own = {connection.laddr.port for connection in psutil.Process().net_connections("tcp")}
    workers = [process for role in ("prefill", "decode") for process in stack.processes(role)]
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port not in own
        for process in workers
        for connection in process.net_connections("tcp")
    )


async def metrics(stack: Stack, role: str) -> dict[str, float]:
    values: dict[str, float] = {}
    async with httpx.AsyncClient() as http:
        for address in stack.metrics_addresses(role):
            for line in (await http.get(f"http://{address}/metrics")).text.splitlines():
                if not line.startswith("#"):
                    name, value = line.rsplit(" ", 1)
                    values[name] = float(value.split()[0])
    return values


def refused(values: dict[str, float]) -> dict[str, int]:
    return {
        name.partition('reason="')[2].partition('"')[0]: int(value)
        for name, value in values.items()
        if name.startswith("baton_peer_messages_refused_total")
    }


async def test_odd_messages_change_nothing(stack: Stack) -> None:
    token = PeerToken(stack.token_file)  # type: ignore[attr-defined]
    [decode], [prefill] = stack.pods("decode"), stack.pods("prefill")
    decode.token = prefill.token = token
    expected = [await ask(stack, number) for number in range(len(PROMPTS))]
    processes = {name: process.pid for name, process in stack.all_processes().items()}
    fingerprint = (await prefill.info()).fingerprint
    await asyncio.sleep(0.5)
    open_before, answered, began = connections(stack), Counter[str](), time.monotonic()
    asking = asyncio.create_task(client(stack, expected, answered))
    async with AsyncExitStack() as exits:
        seeds = [Odd(SEED * 1000 + number, 512, 2048) for number in range(2)]
        broken = [await exits.enter_async_context(broken_prefill(odd, token)) for odd in seeds]
        attack = Attack(stack, decode, prefill, fingerprint, broken)
        sizes: list[dict[str, int]] = []
        for part in range(1, 11):
            await attack.until(MESSAGES * part // 10)
            sizes.append(memory(stack))
            print(f"RSS after {attack.total} messages, MiB:", {n: size >> 20 for n, size in sizes[-1].items()})
        total, took = attack.total, time.monotonic() - began
    asking_failed = asking.done() and asking.exception()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(5)

    reports = {role: await metrics(stack, role) for role in ("prefill", "decode")}
    # Sizes go up and down by more than a leak would add, but only a leak raises the lowest of several.
    middle, end = lows(sizes[3:6]), lows(sizes[7:])
    grown = {name: size - middle[name] for name, size in end.items() if name in middle}
    print(f"\n{total} messages in {took:.0f} s (seed {SEED}): {dict(attack.sent)}, prefills {[b.sent for b in broken]}")
    print(f"answers of the client: {dict(answered)}; refused: { {r: refused(v) for r, v in reports.items()} }")
    print("RSS grown by, MiB:", {name: round(size / (1 << 20), 1) for name, size in grown.items()})

    assert not asking_failed, asking_failed
    assert answered["right"]
    assert {name: process.pid for name, process in stack.all_processes().items()} == processes, (
        "a process was restarted"
    )
    lines = stack.process.lines
    bad = [at for at, line in enumerate(lines) if "Traceback" in str(line) or line.get("event") == "message_failed"]
    assert not bad, "\n".join(line["message"] for line in lines[max(bad[0] - 5, 0) : bad[0] + 40])
    await decode.idle(0.5)
    await prefill.idle(0.5)
    for values in reports.values():
        assert sum(value for name, value in values.items() if name.startswith("baton_open_tickets")) == 0
    assert connections(stack) <= open_before, "a worker holds a connection that it did not have before"
    assert all(size < MOST_GROWTH_BYTES for size in grown.values()), grown
    assert refused(reports["decode"])["field"]
    assert refused(reports["prefill"])["repeated"]
    for number, tokens in enumerate(expected):
        assert await ask(stack, number) == tokens
    logged = str(stack.process.lines)
    assert TOKEN not in logged
