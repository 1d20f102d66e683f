"""A tenant's prompts are invisible to other tenants: by cached_tokens and by the time to the first token."""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton_common.block_hash import block_keys
from baton_common.cache_scope import CacheScope
from baton_gateway.tenancy.cache_salt import cache_salt
from baton_gateway.tenancy.tenants import Identity, Tenant
from baton_proto import serving_pb2 as pb
from tests.gateway.harness import Stack, running
from tests.tenant_keys import write_tenants

from .conftest import LOOP, StartWorker
from .decode_client import DecodeClient
from .decode_side import decode_side
from .prompts import BLOCK_SIZE, make_prompt
from .workers import Worker

Headers = dict[str, dict[str, str]]
TENANTS: dict[str, dict[str, str]] = {
    **{name: {} for name in ("acme", "road", "third", "fourth")},
    **{name: {"cache_group": "eu"} for name in ("north", "south")},
}
MODES = ["disaggregated", "aggregated"]
LONG = 800
SAMPLES = 20
# If the two kinds of guesses take the same time, a test says otherwise once in so many runs.
SIGNIFICANT = 1e-3


@pytest.fixture(scope="module")
def tenants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants") / "tenants.json"


@pytest.fixture(scope="module")
def headers(tenants_file: Path) -> Headers:
    return write_tenants(tenants_file, TENANTS)


def gateway_to(
    decodes: Sequence[Worker], prefills: Sequence[Worker], model: Path | None, **settings: Any
) -> AbstractAsyncContextManager[Stack]:
    """Run a gateway in this process for real pods."""
    return running(model, decodes, prefills, local_prefill=False, resume_timeout_s=30, **settings)  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def gateways(
    llama: Path, decode: Worker, prefill: Worker, tenants_file: Path, headers: Headers
) -> AsyncIterator[dict[str, Stack]]:
    """Two gateways with the same decode pod; only one of them hands prompts to the prefill pod."""
    async with (
        gateway_to([decode], [prefill], llama, tenants_file=tenants_file) as apart,
        gateway_to([decode], [], llama, tenants_file=tenants_file) as alone,
    ):
        yield dict(zip(MODES, (apart, alone), strict=True))


async def post(stack: Stack, path: str, headers: dict[str, str], **body: Any) -> dict[str, Any]:
    # With one token alone the decode pod would not wait for the KV.
    fields = {"model": "tiny", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **body}
    answer = await stack.http.post(path, json=fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def cached(stack: Stack, headers: dict[str, str], prompt: list[int], **body: Any) -> int:
    return cached_tokens(await post(stack, "/v1/completions", headers, prompt=prompt, **body))


@pytest.mark.parametrize("mode", MODES)
async def test_a_tenant_finds_its_own_prompt_and_no_other_does(
    gateways: dict[str, Stack], headers: Headers, mode: str
) -> None:
    stack, prompt = gateways[mode], make_prompt(150, seed=100 + len(mode))
    found = [await cached(stack, headers[tenant], prompt) for tenant in ("acme", "acme", "road", "north", "south")]
    assert found == [0, 144, 0, 0, 144]


async def test_neither_pod_of_a_handover_tells(gateways: dict[str, Stack], headers: Headers) -> None:
    """Both pods have the prompt, and each computes it for a tenant that has never sent it."""
    prompt = make_prompt(150, seed=120)
    for mode, other in zip(MODES, ("road", "third"), strict=True):
        await cached(gateways["disaggregated"], headers["acme"], prompt)
        assert await cached(gateways[mode], headers[other], prompt) == 0
        assert await cached(gateways[mode], headers["acme"], prompt) == 144


@pytest.mark.parametrize("mode", MODES)
async def test_answers_are_the_tenants_own_as_well(gateways: dict[str, Stack], headers: Headers, mode: str) -> None:
    stack, prompt = gateways[mode], make_prompt(40, seed=130 + len(mode))
    fields = {"prompt": prompt, "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 60, "return_token_ids": True}
    answer = await post(stack, "/v1/completions", headers["acme"], **fields)
    for choice, other in zip(answer["choices"], ("road", "third"), strict=True):
        turn = [*prompt, *choice["token_ids"]]
        assert await cached(gateways["aggregated"], headers[other], turn) == 0
        assert await cached(gateways["aggregated"], headers["acme"], turn) == 96


async def test_engines_tell_gateways_of_the_keys_that_these_look_for(
    gateways: dict[str, Stack], headers: Headers, decode: Worker, prefill: Worker
) -> None:
    prompt = make_prompt(150, seed=140)
    await cached(gateways["disaggregated"], headers["acme"], prompt)
    scope = CacheScope(cache_salt(Identity("acme", Tenant())))
    keys = set(block_keys(prompt, BLOCK_SIZE, scope))
    assert not keys & set(block_keys(prompt, BLOCK_SIZE))
    await asyncio.gather(decode.caches(keys), prefill.caches(keys))


async def test_an_answer_that_goes_on_elsewhere_is_still_the_tenants_own(
    llama: Path, tenants_file: Path, headers: Headers, start_worker: StartWorker
) -> None:
    pods = {pod.address: pod for pod in [await start_worker("decode"), await start_worker("decode")]}
    prompt = make_prompt(100, seed=150)
    async with gateway_to(list(pods.values()), [], llama, tenants_file=tenants_file) as stack:
        fields = {"prompt": prompt, "max_tokens": 1_500, "return_token_ids": True}
        asking = asyncio.create_task(post(stack, "/v1/completions", headers["acme"], **fields))
        decodes = stack.fleet.router.decodes
        await stack.until(lambda: any(pod.requests.charged for pod in decodes))
        [doomed] = [pod for pod in decodes if pod.requests.charged]
        await pods[doomed.address].until(lambda load: load.running and load.blocks_held > 10)
        await pods[doomed.address].kill()
        [choice] = (await asking)["choices"]
        metrics = (await stack.admin("/metrics")).text
        assert "baton_gateway_resumed_streams_total 1.0" in metrics
        turn = [*prompt, *choice["token_ids"]]
        assert await cached(stack, headers["road"], turn) == 0
        assert len(turn) == 1_600
        # The last token has been sampled and not computed.
        assert await cached(stack, headers["acme"], turn) == 1_584


async def test_a_salt_that_no_hash_takes_ends_the_request_and_no_pod(decode: Worker, prefill: Worker) -> None:
    scope, prompt = pb.CacheScope(salt=b"x" * 65), make_prompt(40, seed=160)
    async with DecodeClient(decode) as client, decode_side(prefill) as side:
        answer = await (await client.submit(prompt, cache_scope=scope)).until(lambda answer: answer.done)
        assert answer.failure is not None
        assert (answer.failure.code, answer.failure.param) == (pb.Failure.CODE_INVALID, "cache_scope")
        await side.order(1, prompt, 5_000, cache_scope=scope)
        assert (await side.receive()).failed.failure.param == "cache_scope"
        assert len((await client.ask(prompt, prefill, max_tokens=4)).only) == 4


@pytest.mark.parametrize("mode", MODES)
async def test_full_blocks_of_a_published_beginning_are_everybodys_and_nothing_beyond(
    llama: Path, decode: Worker, prefill: Worker, tmp_path: Path, tenants_file: Path, headers: Headers, mode: str
) -> None:
    public = f"You answer for {mode} readers, and in plain English. " * 3
    pool = {"decode": [decode.address], "prefill": [prefill.address] if mode == "disaggregated" else []}
    model = {"folder": str(llama), "name": "tiny", "pools": [pool]}
    model["published_prefixes"] = [{"messages": [{"role": "system", "content": public}]}]
    (tmp_path / "models.json").write_text(json.dumps({"models": [model]}))
    settings = {"tenants_file": tenants_file, "models_file": tmp_path / "models.json"}
    async with gateway_to([decode], [prefill][: len(pool["prefill"])], None, **settings) as stack:
        own = len(stack.ids(f"<|begin|><|system|>{public}<|end|><|user|>"))

        async def chat(tenant: str, user: str) -> int:
            messages = [{"role": "system", "content": public}, {"role": "user", "content": user}]
            return cached_tokens(await post(stack, "/v1/chat/completions", headers[tenant], messages=messages))

        secret = "The merger with the lighthouse company is on Friday. " * 4
        assert own % BLOCK_SIZE, "the boundary falls within a block"
        assert await chat("acme", secret) == 0
        assert await chat("road", secret) == own // BLOCK_SIZE * BLOCK_SIZE
        assert await chat("acme", secret) > own + BLOCK_SIZE


@pytest.mark.parametrize("mode", MODES)
async def test_the_time_to_the_first_token_tells_nothing_of_other_tenants(
    gateways: dict[str, Stack], headers: Headers, mode: str
) -> None:
    """Right guesses of another tenant's prompts take as long as wrong ones; within a group they are told apart."""
    stack = gateways[mode]
    strangers = await guesses(stack, headers["acme"], headers["road"], SAMPLES, seed=200 + len(mode))
    assert rank_sum_p(*strangers) > SIGNIFICANT
    group = await guesses(stack, headers["north"], headers["south"], SAMPLES * 3 // 4, seed=300 + len(mode))
    assert rank_sum_p(*group) < SIGNIFICANT


async def guesses(
    stack: Stack, victim: dict[str, str], guesser: dict[str, str], count: int, seed: int
) -> tuple[list[float], list[float]]:
    """Return the seconds that right and wrong guesses took, all of prompts that the guesser has never sent before."""
    times: dict[bool, list[float]] = {True: [], False: []}
    rng = random.Random(seed)
    for index in range(count):
        for right in rng.sample([True, False], 2):
            secret, other = (make_prompt(LONG, seed * 1_000 + 4 * index + 2 * right + i) for i in range(2))
            await cached(stack, victim, secret)
            began = time.perf_counter()
            await cached(stack, guesser, secret if right else other, max_tokens=1)
            times[right].append(time.perf_counter() - began)
    return times[True], times[False]


def rank_sum_p(first: list[float], second: list[float]) -> float:
    """Return the two-sided p value of the Mann-Whitney U test (no ties), by the normal approximation."""
    u = sum(a < b for a in first for b in second)
    m, n = len(first), len(second)
    z = (u - m * n / 2) / math.sqrt(m * n * (m + n + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))
