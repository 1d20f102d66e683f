"""Whatever happens to a hand-over, the answer is right and nothing stays behind."""

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from baton_common.block_hash import block_keys
from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb
from tests.conftest import MakeModel
from tests.models import reference_choices

from .conftest import StartWorker
from .decode_client import Answer, DecodeClient
from .prompts import BLOCK_SIZE, make_prompt
from .relay import relay_to
from .workers import Worker

# One token a step: a prompt this long takes a prefill pod seconds, a decode pod that computes it itself a few steps.
SLOW = {"max_num_batched_tokens": 1}
LONG = 1_600


def assert_reference(folder: Path, prompt: list[int], answer: Answer) -> None:
    for tokens in answer.tokens.values():
        assert tokens == reference_choices(folder, prompt, tokens)


def assert_prefilled_by(answer: Answer, other_pod: bool) -> None:
    assert answer.prompt is not None
    assert answer.prompt.disaggregated == other_pod


async def under_way(prefill: Worker, answer: Answer) -> None:
    """Wait until the prefill pod has computed some blocks of the prompt, but not all."""
    await prefill.until(lambda load: load.running and 0 < load.queued_prefill_tokens < LONG - 2 * BLOCK_SIZE)
    assert answer.first_token_at is None


async def test_both_pods_report_the_blocks_of_a_prompt(decode: Worker, prefill: Worker) -> None:
    prompt = make_prompt(150, seed=77)
    keys = set(block_keys(prompt, BLOCK_SIZE))
    async with DecodeClient(decode) as client:
        hearing = [asyncio.create_task(pod.caches(keys)) for pod in (decode, prefill)]
        assert_prefilled_by(await client.ask(prompt, prefill, max_tokens=2), other_pod=True)
        await asyncio.gather(*hearing)
    # Who begins to listen only now hears of it at once.
    await asyncio.gather(decode.caches(keys), prefill.caches(keys))


async def test_nothing_listens_at_the_prefill_address(llama: Path, decode: Worker) -> None:
    prompt = make_prompt(150, seed=1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with DecodeClient(decode) as client:
            answers = [await client.submit(prompt, address, n=n) for n in (1, 3)]
            for answer in answers:
                await answer.finished()
                assert_reference(llama, prompt, answer)
                assert_prefilled_by(answer, other_pod=False)
    await decode.idle()


async def test_the_prefill_address_is_no_prefill_pod(llama: Path, decode: Worker, start_worker: StartWorker) -> None:
    other = await start_worker("decode")
    prompt = make_prompt(150, seed=2)
    async with DecodeClient(decode) as client:
        answer = await client.ask(prompt, other)
    assert_reference(llama, prompt, answer)
    assert_prefilled_by(answer, other_pod=False)


async def test_another_model_on_the_prefill_pod(
    llama: Path, decode: Worker, tiny_model: MakeModel, start_worker: StartWorker
) -> None:
    """Same shapes, other weights: only the fingerprint can tell."""
    same_shapes = {"rope": "llama3", "num_key_value_heads": 1, "max_position_embeddings": 2048}
    stranger = await start_worker("prefill", tiny_model("llama", seed=1, **same_shapes))
    prompt = make_prompt(150, seed=3)
    logged = len(decode.process.lines)
    async with DecodeClient(decode) as client:
        answer = await client.ask(prompt, stranger)
    assert_reference(llama, prompt, answer)
    assert_prefilled_by(answer, other_pod=False)
    line = await decode.process.wrote(lambda line: line.get("event") == "link_lost", 10, logged)
    assert "KV layouts differ" in line["message"]
    assert stranger.address in line["message"]
    await asyncio.gather(decode.idle(), stranger.idle())


async def test_pods_with_kv_in_fp8_and_one_without(llama: Path, prefill: Worker, start_worker: StartWorker) -> None:
    decode = await start_worker("decode", llama, kv_cache_dtype="fp8")
    same = await start_worker("prefill", llama, kv_cache_dtype="fp8")
    logged = len(decode.process.lines)
    async with DecodeClient(decode) as client:
        handed_over = await client.ask(make_prompt(150, seed=41), same)
        alone = await client.ask(make_prompt(150, seed=42), prefill)
        again = await client.ask(make_prompt(150, seed=42), same)
    assert_prefilled_by(handed_over, other_pod=True)
    assert_prefilled_by(alone, other_pod=False)
    assert alone.tokens == again.tokens
    line = await decode.process.wrote(lambda line: line.get("event") == "link_lost", 10, logged)
    assert "KV here is float32, there float8_e4m3fn with the scales " in line["message"]
    assert "same --dtype, --quantization and --kv-cache-dtype" in line["message"]
    await asyncio.gather(decode.idle(), same.idle(), prefill.idle())


async def test_the_prefill_pod_is_killed(llama: Path, decode: Worker, start_worker: StartWorker) -> None:
    doomed = await start_worker("prefill", **SLOW)
    prompt = make_prompt(LONG, seed=4)
    async with DecodeClient(decode) as client:
        bystander = await client.submit(make_prompt(40, seed=5), max_tokens=500)
        answer = await client.submit(prompt, doomed, n=2)
        await under_way(doomed, answer)
        doomed.process.send_to_group(signal.SIGKILL)
        for each in (answer, bystander):
            await each.finished()
    assert_reference(llama, prompt, answer)
    assert_prefilled_by(answer, other_pod=False)
    assert_reference(llama, make_prompt(40, seed=5), bystander)
    await decode.idle()


async def test_another_prefill_pod_takes_over(
    llama: Path, decode: Worker, prefill: Worker, start_worker: StartWorker
) -> None:
    """The first pod dies with the prompt half done, the second refuses, the third delivers."""
    doomed = await start_worker("prefill", **SLOW)
    prompt = make_prompt(LONG, seed=45)
    async with DecodeClient(decode) as client:
        answer = await client.submit(prompt, doomed, "127.0.0.1:1", prefill, n=2)
        await under_way(doomed, answer)
        doomed.process.send_to_group(signal.SIGKILL)
        await answer.finished()
    assert_reference(llama, prompt, answer)
    assert_prefilled_by(answer, other_pod=True)
    await asyncio.gather(decode.idle(), prefill.idle())


async def test_another_prefill_pod_sends_the_rest(decode: Worker, prefill: Worker, start_worker: StartWorker) -> None:
    """The first tokens are with the client when the first pod is lost; the second one's are the same and not shown."""
    second = await start_worker("prefill")
    prompt, sampling = make_prompt(150, seed=46), {"n": 2, "temperature": 1.0, "seed": 9}
    async with DecodeClient(decode) as client, relay_to(prefill) as relay:
        relay.gate.clear()
        answer = await client.submit(prompt, relay.address, second, **sampling)
        await answer.until(lambda answer: all(answer.tokens.values()))
        relay.cut.set()
        await answer.finished()
        expected = await client.ask(prompt, **sampling)
    assert answer.tokens == expected.tokens
    assert (await second.load()).prefix_queries == len(prompt)
    await asyncio.gather(decode.idle(), prefill.idle(), second.idle())


async def test_a_prefill_pod_falls_silent_behind_a_connection_that_stays_up(
    llama: Path, decode: Worker, prefill: Worker, start_worker: StartWorker
) -> None:
    second = await start_worker("prefill")
    prompt = make_prompt(150, seed=47)
    async with DecodeClient(decode) as client, relay_to(prefill) as relay:
        await client.ask(make_prompt(20, seed=48), relay.address, max_tokens=2)
        relay.voice.clear()
        answer = await client.submit(prompt, relay.address, second)
        await answer.finished(timeout_s=15)
        relay.voice.set()
    assert_reference(llama, prompt, answer)
    assert_prefilled_by(answer, other_pod=True)
    await asyncio.gather(decode.idle(), prefill.idle(), second.idle())


async def test_a_pod_at_the_same_address_is_used_again(llama: Path, decode: Worker, start_worker: StartWorker) -> None:
    """The link that broke with the first pod must not stand in the way of the second."""
    first = await start_worker("prefill")
    port = int(first.address.rpartition(":")[2])
    prompts = [make_prompt(150, seed=seed) for seed in (6, 7)]
    async with DecodeClient(decode) as client:
        assert_prefilled_by(await client.ask(prompts[0], first), other_pod=True)
        await first.kill()
        second = await start_worker("prefill", port=port)
        answer = await client.ask(prompts[1], second)
    assert_reference(llama, prompts[1], answer)
    assert_prefilled_by(answer, other_pod=True)


@pytest.mark.parametrize("how", ["cancel", "stream lost"])
async def test_a_request_ends_while_its_kv_is_under_way(decode: Worker, start_worker: StartWorker, how: str) -> None:
    slow = await start_worker("prefill", **SLOW)
    async with DecodeClient(decode) as client:
        answer = await client.submit(make_prompt(LONG, seed=8), slow)
        await under_way(slow, answer)
        if how == "cancel":
            await client.cancel(answer)
        else:
            await client.close()
        _, load = await asyncio.gather(decode.idle(), slow.idle())
    assert 0 < load.blocks_cached < LONG // BLOCK_SIZE, "the prompt was computed to its end"


async def test_a_gateway_vanishes_with_requests_in_every_state(decode: Worker, prefill: Worker) -> None:
    async with DecodeClient(decode) as client:
        running = await client.submit(make_prompt(40, seed=9), prefill, max_tokens=1_900, n=3)
        await running.until(lambda answer: len(answer.tokens[2]) > 3)
        for seed in range(10, 30):
            await client.submit(make_prompt(400, seed=seed), prefill if seed % 2 else "", max_tokens=1_000)
        await decode.until(lambda load: load.waiting or load.tickets)
    await asyncio.gather(decode.idle(), prefill.idle())


async def test_a_lease_ends_on_a_frozen_decode_pod(tiny_model: MakeModel, start_worker: StartWorker) -> None:
    # Deep enough for the prompt to take several leases on any processor: a KV sent to its end would be taken.
    deep = tiny_model("llama", num_hidden_layers=12, max_position_embeddings=2048)
    slow, frozen = await asyncio.gather(
        start_worker("prefill", deep, **SLOW), start_worker("decode", deep, lease_seconds=1)
    )
    prompt = make_prompt(LONG, seed=31)
    async with DecodeClient(frozen) as client:
        answer = await client.submit(prompt, slow)
        await under_way(slow, answer)
        frozen.freeze()
        try:
            line = await slow.process.logged("lease_expired", 10)
            assert line["request_id"] == "test-1"
            await slow.idle()
            assert answer.first_token_at is None
        finally:
            frozen.thaw()
        await answer.finished()
    assert_reference(deep, prompt, answer)
    assert_prefilled_by(answer, other_pod=False)
    await frozen.idle()


async def test_the_first_token_does_not_wait_for_the_kv(llama: Path, decode: Worker, prefill: Worker) -> None:
    prompt = make_prompt(150, seed=32)
    async with DecodeClient(decode) as client, relay_to(prefill) as relay:
        relay.gate.clear()
        answer = await client.submit(prompt, relay.address)
        await answer.until(lambda answer: answer.only)
        await asyncio.wait_for(relay.held.wait(), 10)
        assert relay.num_pieces == 1
        assert (await decode.load()).tickets == 1
        assert len(answer.only) == 1
        relay.gate.set()
        await answer.finished()
    assert_reference(llama, prompt, answer)
    assert_prefilled_by(answer, other_pod=True)
    await asyncio.gather(decode.idle(), prefill.idle())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
async def test_the_link_breaks_after_the_first_token(
    decode: Worker, prefill: Worker, sampling: dict[str, float]
) -> None:
    """The client has that token already: it is kept, and what follows is what would have followed."""
    prompt = make_prompt(150, seed=33)
    async with DecodeClient(decode) as client, relay_to(prefill) as relay:
        relay.gate.clear()
        answer = await client.submit(prompt, relay.address, n=2, **sampling)
        await answer.until(lambda answer: all(answer.tokens.values()))
        relay.cut.set()
        await answer.finished()
        assert_prefilled_by(answer, other_pod=True)
        expected = await client.ask(prompt, n=2, **sampling)
    assert answer.tokens == expected.tokens
    await asyncio.gather(decode.idle(), prefill.idle())


async def test_one_token_is_wanted(llama: Path, decode: Worker, prefill: Worker) -> None:
    """The prefill pod's token ends the request; its KV is of use to nobody."""
    prompt = make_prompt(150, seed=34)
    async with DecodeClient(decode) as client:
        answer = await client.ask(prompt, prefill, max_tokens=1, n=3)
    assert_reference(llama, prompt, answer)
    assert all(len(tokens) == 1 for tokens in answer.tokens.values())
    await asyncio.gather(decode.idle(), prefill.idle())


async def test_a_choice_ends_with_its_first_token(decode: Worker, prefill: Worker) -> None:
    """The others go on."""
    prompt, sampling = make_prompt(150, seed=35), {"temperature": 1.5, "seed": 3, "n": 4, "max_tokens": 20}
    async with DecodeClient(decode) as client:
        firsts = [tokens[0] for tokens in (await client.ask(prompt, **sampling)).tokens.values()]
        assert len(set(firsts)) > 1
        local = await client.ask(prompt, **sampling, stop_token_ids=[firsts[1]])
        remote = await client.ask(prompt, prefill, **sampling, stop_token_ids=[firsts[1]])
    assert remote.tokens == local.tokens
    assert remote.reasons == local.reasons
    assert len(remote.tokens[1]) == 1
    assert len(remote.tokens[0]) > 1
    await asyncio.gather(decode.idle(), prefill.idle())


@pytest.mark.parametrize(
    ("claimed", "max_tokens"), [(pb.FINISH_REASON_NONE, 1), (pb.FINISH_REASON_STOP, 8), (pb.FINISH_REASON_ERROR, 8)]
)
async def test_the_prefill_pod_is_wrong_about_the_end_of_a_choice(
    llama: Path, decode: Worker, prefill: Worker, claimed: pb.FinishReason, max_tokens: int
) -> None:
    """A request ends all the same, and a choice that the client takes for ended gets no more tokens."""
    prompt = make_prompt(150, seed=350 + claimed)

    def wrong(first: kv.FirstTokens) -> None:
        first.deltas[0].finish_reason = claimed

    async with DecodeClient(decode) as client, relay_to(prefill) as relay:
        relay.firsts = wrong
        answer = await (await client.submit(prompt, relay.address, n=2, max_tokens=max_tokens)).finished(10)
    assert_reference(llama, prompt, answer)
    assert answer.reasons[1] == pb.FINISH_REASON_LENGTH
    assert answer.reasons[0] == (claimed if claimed == pb.FINISH_REASON_STOP else pb.FINISH_REASON_LENGTH)
    await asyncio.gather(decode.idle(), prefill.idle())


@pytest.mark.parametrize("under_way", [True, False], ids=["kv under way", "running"])
async def test_one_choice_is_cancelled(llama: Path, decode: Worker, prefill: Worker, under_way: bool) -> None:
    prompt = make_prompt(150, seed=36 + under_way)
    async with DecodeClient(decode) as client, relay_to(prefill) as relay:
        relay.gate.clear()
        # So many that the pod reports several times before their end, and so few that no choice is cut off before.
        answer = await client.submit(prompt, relay.address, n=3, max_tokens=1_500)
        if not under_way:
            relay.gate.set()
            await answer.until(lambda answer: len(answer.tokens[2]) > 4)
        await answer.until(lambda answer: all(answer.tokens.values()))
        await client.cancel_choice(answer, 1)
        relay.gate.set()
        await decode.until(lambda load: load.running == 2)
        await answer.until(lambda answer: all(len(answer.tokens[choice]) > 50 for choice in (0, 2)))
        await client.cancel(answer)
    assert_reference(llama, prompt, answer)
    await asyncio.gather(decode.idle(), prefill.idle())


async def test_links_are_there_before_the_first_request(start_worker: StartWorker) -> None:
    first, second, pod = await asyncio.gather(*(start_worker(role) for role in ("prefill", "prefill", "decode")))
    async with DecodeClient(pod) as client:
        await client.introduce(first, second)
        for prefill in (first, second):
            await pod.process.wrote(
                lambda line, peer=prefill: line.get("event") == "linked" and peer.address in line["message"]
            )
        lines = len(pod.process.lines)
        port = int(first.address.rpartition(":")[2])
        await first.kill()
        await start_worker("prefill", port=port)
        await pod.process.wrote(lambda line: line.get("event") == "linked", after=lines)
