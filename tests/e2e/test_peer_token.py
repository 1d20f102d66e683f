"""Pods that share a token give the same answers, refuse strangers at all ports, and follow a token that is replaced."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from baton_cli.ports import free_loopback_ports
from baton_common.peer_rpc import open_channel
from baton_common.peer_token import PeerToken
from baton_kv import bulk
from baton_proto import serving_pb2 as pb
from baton_proto.handover_pb2 import PiecesRequest
from baton_proto.handover_pb2_grpc import PrefillStub
from baton_proto.serving_pb2_grpc import DecodeStub, WorkerStub
from tests.models import reference_choices
from tests.peer_files import write_tokens

from .conftest import LOOP, StartWorker
from .decode_client import DecodeClient
from .process import Process
from .prompts import make_prompt
from .stack import STEP_TOKENS, Stack
from .test_peer_tls import assert_handed_over
from .workers import Worker

OURS, NEXT, OTHERS = "our-token-0123456789", "our-next-token-0123456789", "their-token-0123456789"


@pytest.fixture(scope="module")
def ports() -> list[int]:
    """Of the prefill pod: for KV and for metrics."""
    return free_loopback_ports(2)


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def pods(
    llama: Path, ports: list[int], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Worker]]:
    """A prefill pod, and a decode pod for each transport of KV."""
    file = write_tokens(tmp_path_factory.mktemp("token") / "tokens", OURS)
    kv_port, metrics_port = ports
    flags = {"kv_port": kv_port, "metrics_port": metrics_port, "max_num_batched_tokens": 48}
    workers = await asyncio.gather(
        Worker.start("prefill", llama, peer_token_file=file, **flags),
        Worker.start("decode", llama, peer_token_file=file, kv_transport="tcp"),
        Worker.start("decode", llama, peer_token_file=file, kv_transport="grpc"),
    )
    yield dict(zip(("prefill", "tcp", "grpc"), workers, strict=True))
    await asyncio.gather(*(worker.kill() for worker in workers))


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_tokens_are_those_of_the_reference(llama: Path, pods: dict[str, Worker], transport: str) -> None:
    prompt = make_prompt(150, seed=1)
    async with DecodeClient(pods[transport]) as client:
        assert_handed_over(llama, prompt, await client.ask(prompt, pods["prefill"]))
    assert (await pods[transport].process.logged("linked", 10))["transport"] == transport
    await asyncio.gather(pods[transport].idle(), pods["prefill"].idle())


async def refusals(address: str, token: PeerToken | None) -> dict[str, grpc.StatusCode]:
    """Return what each RPC of a pod answers, those of a stream before any message is sent."""

    async def code(call: grpc.aio.Call) -> grpc.StatusCode:
        async with asyncio.timeout(10):
            return await call.code()

    async with open_channel(address, [("grpc.use_local_subchannel_pool", 1)], None, token) as channel:
        calls = {
            "Serve": DecodeStub(channel).Serve(),
            "Watch": WorkerStub(channel).Watch(pb.WatchRequest()),
            "Handover": PrefillStub(channel).Handover(),
            "Pieces": PrefillStub(channel).Pieces(PiecesRequest(session=1)),
            "Check": HealthStub(channel).Check(HealthCheckRequest()),
        }
        return {name: await code(call) for name, call in calls.items()}


@pytest.mark.parametrize("shown", [None, OTHERS])
async def test_strangers_are_refused_at_every_port_and_nothing_is_lost(
    llama: Path, pods: dict[str, Worker], ports: list[int], tmp_path: Path, shown: str | None
) -> None:
    token = PeerToken(write_tokens(tmp_path / "tokens", shown)) if shown else None
    prompt = make_prompt(150, seed=10 + bool(shown))
    async with DecodeClient(pods["tcp"]) as client:
        answer = await client.submit(prompt, pods["prefill"], max_tokens=200)
        await answer.until(lambda answer: answer.only)
        for worker in pods.values():
            codes = await refusals(worker.address, token)
            assert set(codes.values()) == {grpc.StatusCode.UNAUTHENTICATED}, codes
        with pytest.raises(OSError), await bulk.connect("127.0.0.1", ports[0], b"x" * 16, None) as connection:
            await asyncio.wait_for(bulk.receive_frame(connection), 10)
        assert_handed_over(llama, prompt, await answer.finished())
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{ports[1]}/metrics")).text
    counted = {
        line.split()[0]: float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("baton_peer_refusals_total")
    }
    assert sorted(counted.values()) >= [1.0, 5.0]
    await asyncio.gather(*(worker.idle() for worker in pods.values()))
    for worker in pods.values():
        assert not any(secret in str(worker.process.lines) for secret in (OURS, OTHERS))


async def test_a_decode_pod_of_another_release_gets_no_kv(
    llama: Path, pods: dict[str, Worker], tmp_path: Path, start_worker: StartWorker
) -> None:
    """It says why, and computes the prompt itself."""
    stranger = await start_worker("decode", peer_token_file=write_tokens(tmp_path / "tokens", OTHERS))
    prompt = make_prompt(150, seed=15)
    # gRPC's client reports an internal error in place of the refusal if it is writing at that moment; the link is made
    # anew for the next request, and refused again.
    async with DecodeClient(stranger) as client, asyncio.timeout(60):
        while not any("--peer-token-file" in line.get("message", "") for line in stranger.process.lines):
            answer = await client.ask(prompt, pods["prefill"])
            assert answer.only == reference_choices(llama, prompt, answer.only)
            assert answer.prompt is not None
            assert not answer.prompt.disaggregated
            await stranger.process.logged("link_lost", 10)


async def test_the_token_is_replaced_without_an_outage(llama: Path, tmp_path: Path, start_worker: StartWorker) -> None:
    """A stream goes on through all steps, and new links are made between pods that are a step apart."""
    files = [write_tokens(tmp_path / name, OURS) for name in ("prefill", "decode")]
    first, second, third, decode = await asyncio.gather(
        *(start_worker("prefill", peer_token_file=files[0]) for _ in range(3)),
        start_worker("decode", peer_token_file=files[1]),
    )
    async with DecodeClient(decode) as client:
        prompts = [make_prompt(150, seed=seed) for seed in (20, 21, 22)]
        answer = await client.submit(prompts[0], first, max_tokens=1_500)
        await answer.until(lambda answer: len(answer.only) > 4)
        write_tokens(files[0], OURS, NEXT)
        async with DecodeClient(decode) as other:
            assert_handed_over(llama, prompts[1], await other.ask(prompts[1], second))
        write_tokens(files[1], NEXT, OURS)
        async with DecodeClient(decode) as other:
            assert_handed_over(llama, prompts[2], await other.ask(prompts[2], third))
        for file in files:
            write_tokens(file, NEXT)
        # Also those log it that make no new connection.
        await asyncio.gather(*(pod.process.logged("peer_token_replaced", 15) for pod in (first, decode)))
        old = await refusals(decode.address, PeerToken(write_tokens(tmp_path / "old", OURS)))
        assert set(old.values()) == {grpc.StatusCode.UNAUTHENTICATED}
        assert_handed_over(llama, prompts[0], await answer.finished())
    await asyncio.gather(decode.idle(), first.idle(), second.idle())


async def test_a_whole_baton_with_a_token(llama: Path, tmp_path: Path) -> None:
    """Gateway and workers by the environment; no log has the token."""
    flags = ("--num-blocks", "512", "--max-num-batched-tokens", str(STEP_TOKENS))
    file = write_tokens(tmp_path / "tokens", OURS)
    stack = await Stack.start(llama, *flags, env={"BATON_PEER_TOKEN_FILE": str(file)})
    try:
        prompt = make_prompt(150, seed=30)
        [tokens] = await stack.tokens(prompt, 20)
        assert tokens == reference_choices(llama, prompt, tokens)
        [prefill] = stack.pods("prefill")
        assert set((await refusals(prefill.address, None)).values()) == {grpc.StatusCode.UNAUTHENTICATED}
        prefill.token = PeerToken(file)
        assert (await prefill.load()).prefix_queries >= len(prompt)
    finally:
        await stack.stop()
    assert OURS not in str(stack.process.lines)


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
async def test_a_token_of_no_use_is_one_line_and_a_failure(llama: Path, tmp_path: Path, role: str) -> None:
    args = [f"--model={llama}", *(["--decode-addresses=127.0.0.1:1"] if role == "gateway" else [])]
    for tokens, words in ((["too-short"], "token 1 must have 16"), ([], "no token")):
        file = write_tokens(tmp_path / "tokens", *tokens)
        process = await Process.start(role, *args, f"--peer-token-file={file}")
        assert await process.ended() == 1
        line = await process.wrote(lambda line, words=words: words in line["message"], 10)
        assert str(file) in line["message"]
        assert "too-short" not in str(process.lines)
