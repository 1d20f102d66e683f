"""Pods that use TLS with each other give the same tokens, refuse strangers, and follow files that are replaced."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import trustme
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from baton_cli.ports import free_loopback_ports
from baton_common.peer_rpc import open_channel
from baton_common.peer_tls import PeerTls
from baton_kv import bulk
from tests.models import reference_choices
from tests.peer_files import STRANGERS, PeerFiles

from .conftest import LOOP, StartWorker
from .decode_client import Answer, DecodeClient
from .process import Process
from .prompts import make_prompt
from .stack import STEP_TOKENS, Stack
from .workers import Worker


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> PeerFiles:
    return PeerFiles(tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="module")
def kv_port() -> int:
    """Of the prefill pod."""
    return free_loopback_ports(1)[0]


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def pods(llama: Path, files: PeerFiles, kv_port: int) -> AsyncIterator[dict[str, Worker]]:
    """A prefill pod, and a decode pod for each transport of KV."""
    workers = await asyncio.gather(
        Worker.start("prefill", llama, peers=files, kv_port=kv_port, max_num_batched_tokens=48),
        Worker.start("decode", llama, peers=files, kv_transport="tcp"),
        Worker.start("decode", llama, peers=files, kv_transport="grpc"),
    )
    yield dict(zip(("prefill", "tcp", "grpc"), workers, strict=True))
    await asyncio.gather(*(worker.kill() for worker in workers))


def assert_handed_over(folder: Path, prompt: list[int], answer: Answer) -> None:
    assert answer.only == reference_choices(folder, prompt, answer.only)
    assert answer.prompt is not None
    assert answer.prompt.disaggregated


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_tokens_are_those_without_tls(llama: Path, pods: dict[str, Worker], transport: str) -> None:
    prompt = make_prompt(150, seed=1)
    async with DecodeClient(pods[transport]) as client:
        assert_handed_over(llama, prompt, await client.ask(prompt, pods["prefill"]))
    assert (await pods[transport].process.logged("linked", 10))["transport"] == transport
    await asyncio.gather(pods[transport].idle(), pods["prefill"].idle())


async def grpc_refuses(worker: Worker, tls: PeerTls | None) -> grpc.StatusCode:
    async with open_channel(worker.address, [("grpc.use_local_subchannel_pool", 1)], tls) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await HealthStub(channel).Check(HealthCheckRequest(), timeout=10)
    return refused.value.code()


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_strangers_are_refused_at_every_port_and_nothing_is_lost(
    llama: Path,
    pods: dict[str, Worker],
    files: PeerFiles,
    kv_port: int,
    tmp_path: Path,
    stranger: Callable[[Path, PeerFiles], PeerTls | None],
) -> None:
    tls = stranger(tmp_path, files)
    prompt = make_prompt(150, seed=STRANGERS.index(stranger) + 10)
    async with DecodeClient(pods["tcp"]) as client:
        answer = await client.submit(prompt, pods["prefill"], max_tokens=200)
        await answer.until(lambda answer: answer.only)
        for worker in pods.values():
            refusals = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED
            assert await grpc_refuses(worker, tls) in refusals
        seen = len(pods["prefill"].process.lines)
        with (
            pytest.raises(OSError),
            await bulk.connect("127.0.0.1", kv_port, b"x" * bulk.TOKEN_BYTES, tls) as connection,
        ):
            await asyncio.wait_for(bulk.receive_frame(connection), 10)
        line = await pods["prefill"].process.wrote(lambda line: line.get("event") == "bulk_refused", 10, seen)
        assert line["level"] == "warning"
        assert_handed_over(llama, prompt, await answer.finished())
    await asyncio.gather(*(worker.idle() for worker in pods.values()))


async def test_renewed_files_are_taken_up_while_streams_go_on(
    llama: Path, tmp_path: Path, start_worker: StartWorker
) -> None:
    """The authority is replaced, too, so that nobody gets on with what the files held before."""
    files, before = PeerFiles(tmp_path / "peers"), PeerFiles(tmp_path / "before")
    before.renew(files.authority)
    first, second, decode = await asyncio.gather(
        *(start_worker(role, peers=files) for role in ("prefill", "prefill", "decode"))
    )
    prompts = [make_prompt(150, seed=seed) for seed in (20, 21)]
    async with DecodeClient(decode) as client:
        answer = await client.submit(prompts[0], first, max_tokens=1_500)
        await answer.until(lambda answer: len(answer.only) > 4)
        files.renew(trustme.CA())
        async with DecodeClient(decode) as other:
            assert_handed_over(llama, prompts[1], await other.ask(prompts[1], second))
        assert await grpc_refuses(decode, before.load()) == grpc.StatusCode.UNAVAILABLE
        await decode.process.logged("peer_certificate_replaced", 10)
        assert not answer.done
        assert_handed_over(llama, prompts[0], await answer.finished())
    # Nobody has connected to the first one anew.
    await asyncio.gather(*(prefill.process.logged("peer_certificate_replaced", 15) for prefill in (first, second)))
    await asyncio.gather(decode.idle(), first.idle(), second.idle())


async def test_a_whole_baton_with_tls(llama: Path, files: PeerFiles) -> None:
    """Gateway and workers by the environment; no log has the key, or says that anything was in the clear."""
    # With this level lines are shown after the pods are ready, too. Pods may link later.
    flags = ("--num-blocks", "512", "--max-num-batched-tokens", str(STEP_TOKENS), "--log-level", "debug")
    stack = await Stack.start(llama, *flags, env=files.env)
    try:
        await stack.process.wrote(lambda line: "linked to prefill pod" in line["message"], 30)
        prompt = make_prompt(150, seed=30)
        [tokens] = await stack.tokens(prompt, 20)
        assert tokens == reference_choices(llama, prompt, tokens)
        [prefill] = stack.pods("prefill")
        prefill.peers = files
        assert (await prefill.load()).prefix_queries >= len(prompt)
    finally:
        await stack.stop()
    output = "\n".join(line["message"] for line in stack.process.lines)
    assert not any(line in output for line in files.key.read_text().splitlines()[1:-1])


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
async def test_files_that_cannot_be_used_are_one_line_and_a_failure(
    llama: Path, files: PeerFiles, tmp_path: Path, role: str
) -> None:
    args = [f"--peer-tls-{kind}-file={path}" for kind, path in (("cert", files.chain), ("ca", files.roots))]
    args += [f"--model={llama}", "--decode-addresses=127.0.0.1:1"] if role == "gateway" else [f"--model={llama}"]
    for key, words in ((None, "give all three or none"), (tmp_path / "none", "No such file")):
        given = [*args, f"--peer-tls-key-file={key}"] if key else args
        process = await Process.start(role, *given)
        assert await process.ended() in (1, 2)
        await process.wrote(lambda line, words=words: words in line["message"], 10)
