"""Fixtures of the tests of `baton bench serve`."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from baton_proto import serving_pb2 as pb
from tests.gateway.fake_worker import Job
from tests.gateway.harness import Stack, pods, running
from tests.gateway.tiny_models import byte_level_tokenizer, write_model

from .canned_server import CannedServer

LOOP: Final = "session"  # gRPC's channels belong to one


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", byte_level_tokenizer())


@pytest_asyncio.fixture(loop_scope=LOOP)
async def gateway(model_folder: Path, processes: None) -> AsyncIterator[Stack]:
    """A gateway whose one pod says as many tokens as it is asked for."""
    async with pods(block_size=16, num_blocks=100) as decodes, running(model_folder, decodes) as stack:
        stack.pod.script = say_all
        stack.pod.load = pb.WorkerLoad(blocks_held=25)
        yield stack


@pytest_asyncio.fixture(loop_scope=LOOP)
async def canned(processes: None) -> AsyncIterator[CannedServer]:
    async with CannedServer().running() as server:
        yield server


async def say_all(job: Job) -> None:
    asked = job.submit.sampling.max_tokens
    for position in range(asked):
        finish = pb.FINISH_REASON_LENGTH if position == asked - 1 else pb.FINISH_REASON_NONE
        await job.send(job.delta([300 + position % 50], finish=finish))
