"""A worker pod without an engine: speaks the real wire and answers by script."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from baton_common.peer_rpc import bind, make_server
from baton_common.peer_tls import PeerTls
from baton_common.peer_token import PeerToken
from baton_proto import serving_pb2 as pb
from baton_proto import serving_pb2_grpc as rpc

STOP, LENGTH, NONE = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_NONE


@dataclass
class Job:
    """One request on the pod, as a script sees it."""

    submit: pb.Submit
    pod: "FakePod"
    outbox: "asyncio.Queue[pb.DecodeMessage]"
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled_choices: list[int] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=dict)

    @property
    def prompt(self) -> list[int]:
        return list(self.submit.prompt_token_ids)

    def delta(
        self, token_ids: Sequence[int] = (), *, choice: int = 0, finish: pb.FinishReason = NONE, **fields: Any
    ) -> pb.Delta:
        """Build a delta; the first of choice 0 carries the prompt's info unless given."""
        offset = self.sent.get(choice, len(self.submit.continuation.token_ids))
        if choice == 0 and not offset and choice not in self.sent:
            fields.setdefault("prompt", pb.PromptInfo(cached_tokens=self.pod.cached_tokens))
        self.sent[choice] = offset + len(token_ids)
        if self.submit.sampling.HasField("logprobs") and "logprobs" not in fields:
            fields["logprobs"] = [self.pod.logprob(token, self.submit.sampling.logprobs) for token in token_ids]
        return pb.Delta(
            handle=self.submit.handle, choice=choice, offset=offset, token_ids=token_ids, finish_reason=finish, **fields
        )

    async def send(self, *deltas: pb.Delta) -> None:
        """Send deltas as one engine step."""
        await self.outbox.put(pb.DecodeMessage(step=pb.StepOutput(deltas=deltas)))
        await self.outbox.join()

    async def fail(self, code: "pb.Failure.Code", message: str = "", param: str = "") -> None:
        failure = pb.Failure(code=code, message=message, param=param)
        await self.send(pb.Delta(handle=self.submit.handle, finish_reason=pb.FINISH_REASON_ERROR, failure=failure))


Script = Callable[[Job], Coroutine[Any, Any, None]]


async def echo(job: Job) -> None:
    """Say the prompt back, a token a step, to every choice, or go on doing so."""
    sampling, continuation = job.submit.sampling, job.submit.continuation
    tokens = job.prompt[: sampling.max_tokens]
    finish = LENGTH if len(tokens) == sampling.max_tokens else STOP
    for position, token in enumerate(tokens):
        if position < len(continuation.token_ids):
            continue
        last = position == len(tokens) - 1
        extra: dict[str, Any] = {}
        if position == 0 and sampling.HasField("prompt_logprobs"):
            extra["prompt"] = job.pod.prompt_info(job)
        await job.send(
            *[
                job.delta([token], choice=choice, finish=finish if last else NONE, **(extra if choice == 0 else {}))
                for choice in range(continuation.choice, continuation.choice + sampling.n)
            ]
        )


def say(token_ids: Sequence[int], *, step: int = 1, finish: pb.FinishReason = STOP, **fields: Any) -> Script:
    """Answer with these tokens, `step` at a time; `fields` go into the last delta."""

    async def script(job: Job) -> None:
        steps = [token_ids[i : i + step] for i in range(0, len(token_ids), step)] or [[]]
        for position, tokens in enumerate(steps):
            last = position == len(steps) - 1
            for choice in range(job.submit.sampling.n):
                extra = fields if last else {}
                await job.send(job.delta(tokens, choice=choice, finish=finish if last else NONE, **extra))

    return script


def hang(*token_ids: int) -> Script:
    """Say some tokens, then nothing more until cancelled."""

    async def script(job: Job) -> None:
        if token_ids:
            await job.send(job.delta(token_ids))
        await asyncio.Event().wait()

    return script


def failing(code: "pb.Failure.Code", message: str = "", param: str = "", after: Sequence[int] = ()) -> Script:
    async def script(job: Job) -> None:
        if after:
            await job.send(job.delta(after))
        await job.fail(code, message, param)

    return script


class FakePod(rpc.DecodeServicer, rpc.WorkerServicer):
    """A decode or prefill pod. Set `script` to decide how it answers."""

    def __init__(
        self,
        role: pb.Role = pb.ROLE_DECODE,
        *,
        max_model_len: int = 512,
        vocab_size: int = 600,
        revision: str = "r1",
        fingerprint: str = "same",
        port: int = 0,
        tls: PeerTls | None = None,
        token: PeerToken | None = None,
        **info: Any,
    ) -> None:
        """info: further fields of WorkerInfo."""
        self.role = role
        self.tls = tls
        self.token = token
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.revision = revision
        self.fingerprint = fingerprint
        self.port = port
        self.info = {"cache_scopes": True, **info}
        self.script: Script = echo
        self.cached_tokens = 0
        self.load = pb.WorkerLoad()
        self.cached: list[int] = []  # keys, as the first report has them
        self.cache_changes: list[pb.CacheChanges] = []  # to be reported next
        self.report_every_s = 0.05
        self.silent = False
        self.jobs: list[Job] = []
        self.cancels: list[int] = []
        self.peers: list[str] = []
        self.arrived = asyncio.Condition()
        self.broken = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._dying: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> "FakePod":
        self._server = make_server([("grpc.so_reuseport", 0)], self.tls, self.token)
        rpc.add_DecodeServicer_to_server(self, self._server)
        rpc.add_WorkerServicer_to_server(self, self._server)
        self.port = bind(self._server, self.address, self.tls)
        await self._server.start()
        return self

    async def stop(self) -> None:
        """Die at once, streams and all."""
        if self._dying is None:
            self.die()
        await self._dying
        self._dying = None

    def die(self) -> None:
        """As `stop`, for scripts: the server does not wait for its own task."""
        server, self._server = self._server, None
        self._dying = asyncio.create_task(server.stop(grace=None) if server is not None else asyncio.sleep(0))

    def drop_streams(self) -> None:
        """Break the Serve streams only."""
        self.broken.set()
        self.broken = asyncio.Event()

    def logprob(self, token_id: int, alternatives: int) -> pb.TokenLogprobs:
        """Make up log probabilities: a token's own is -1, those of the ids after it -2, -3, …"""
        tops = [(token_id + i) % self.vocab_size for i in range(alternatives)]
        return pb.TokenLogprobs(
            token_id=token_id,
            logprob=-1.0,
            rank=1,
            top_token_ids=tops,
            top_logprobs=[-1.0 - i for i in range(alternatives)],
        )

    def prompt_info(self, job: Job) -> pb.PromptInfo:
        alternatives = job.submit.sampling.prompt_logprobs
        logprobs = [pb.TokenLogprobs(), *(self.logprob(token, alternatives) for token in job.prompt[1:])]
        return pb.PromptInfo(cached_tokens=self.cached_tokens, logprobs=logprobs)

    async def job(self, number: int = 0) -> Job:
        """Wait for the pod's request of that number."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.jobs) > number)
        return self.jobs[number]

    async def Serve(self, request_iterator: Any, context: Any) -> None:
        outbox: asyncio.Queue[pb.DecodeMessage] = asyncio.Queue()
        writing = asyncio.Lock()
        work = [
            asyncio.create_task(self._read(request_iterator, outbox)),
            asyncio.create_task(_write(outbox, context, writing)),
            asyncio.create_task(self.broken.wait()),
        ]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            async with writing:  # gRPC takes no status while a write is under way
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
        finally:
            for task in work:
                task.cancel()

    async def _read(self, requests: Any, outbox: "asyncio.Queue[pb.DecodeMessage]") -> None:
        tasks: dict[int, tuple[Job, asyncio.Task[None]]] = {}
        try:
            async for message in requests:
                if message.HasField("submit"):
                    job = Job(message.submit, self, outbox)
                    tasks[message.submit.handle] = (job, asyncio.create_task(self.script(job)))
                    async with self.arrived:
                        self.jobs.append(job)
                        self.arrived.notify_all()
                elif message.HasField("peers"):
                    self.peers = list(message.peers.prefill_addresses)
                else:
                    job, task = tasks.get(message.cancel.handle, (None, None))
                    if message.cancel.HasField("choice"):
                        if job is not None:
                            job.cancelled_choices.append(message.cancel.choice)
                        continue
                    self.cancels.append(message.cancel.handle)
                    if job is not None and task is not None:
                        task.cancel()
                        job.cancelled.set()
        finally:
            for _, task in tasks.values():
                task.cancel()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:
        info = pb.WorkerInfo(
            role=self.role,
            model="fake",
            revision=self.revision,
            epoch=1,
            fingerprint=self.fingerprint,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            **self.info,
        )
        cache = pb.CacheChanges(snapshot=True, gained=self.cached)
        await context.write(pb.WorkerReport(info=info, load=self.load, cache=cache))
        while True:
            await asyncio.sleep(self.report_every_s)
            if not self.silent:
                cache = self.cache_changes.pop(0) if self.cache_changes else None
                await context.write(pb.WorkerReport(load=self.load, cache=cache))


async def _write(outbox: "asyncio.Queue[pb.DecodeMessage]", context: Any, writing: asyncio.Lock) -> None:
    """Write one message after the other: the jobs of a stream may not write to it at the same time."""
    while True:
        message = await outbox.get()
        async with writing:
            await context.write(message)
        outbox.task_done()
