"""Runs a generation and sends its answer, streamed or whole."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton_proto import serving_pb2 as pb

from ..concurrency.crash_log import log_crash
from ..concurrency.pace import Pace
from ..errors import CLIENT_CLOSED_REQUEST, ApiError, internal_error, overloaded, timed_out
from ..generation.answer_memory import AnswerMemory
from ..generation.generation import ClientGoneError, Generation
from ..telemetry.metrics import Metrics
from ..telemetry.record import SEND_BODY, RequestRecord
from .choice import Choice, Piece
from .shapes import Shape, Usage, one_line_each

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
UNPACED_PIECES = 16  # up to this many pieces are encoded and sent without yielding to other tasks
JOINED_TOKENS = 256  # the pieces of a whole answer are joined up to this length, which saves most of their memory
WRITE_BYTES = 64 * 1024  # a larger body is sent in parts of about this size, as the server's buffer holds one part more
PING = b": ping\n\n"
ERROR_WRITE_TIMEOUT_S = 5.0
SLOW_READER_TIMEOUT_S = 60.0  # the same for a client that has read too slowly


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How an answer is sent. Times in seconds.

    usage: a stream ends with a chunk that has the usage. running_usage: every chunk has the usage so far.
    """

    stream: bool
    usage: bool
    running_usage: bool
    keepalive_s: float
    timeout_s: float


class Reply(Response):
    """The answer to a generation.

    A failure before the first byte gets its own HTTP status; a later one ends the stream with an error event. A stream
    begins with its first tokens, or with a comment line after `keepalive_s` without tokens.
    """

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[Choice],
        shape: Shape,
        options: ReplyOptions,
        record: RequestRecord,
        metrics: Metrics,
        n: int,
        memory: AnswerMemory,
    ) -> None:
        """n: choices of each prompt."""
        super().__init__()
        self._generation = generation
        self._choices = choices
        self._shape = shape
        self._options = options
        self._record = record
        self._inter_token = metrics.inter_token.labels(record.model)
        self._n = n
        self._memory = memory
        self._prompts = [pb.PromptInfo() for _ in range(len(choices) // n)]
        self._open = len(choices)
        self._started = False
        self._inside_event = False  # the last bytes that were sent do not end an event
        record.stream = options.stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch_client(receive))
        try:
            # In a task of its own, each token resumes this coroutine directly, not through every layer of middleware.
            await asyncio.create_task(self._run(send, scope.pop(SEND_BODY, send)))
        finally:
            watcher.cancel()
            self._memory.free()
            self._fill_record()

    async def _run(self, send: Send, send_body: Send) -> None:
        try:
            self._record.prepared = time.monotonic()
            self._generation.start()
            async with asyncio.timeout(self._options.timeout_s) as limit:
                await (self._stream(send, send_body, limit) if self._options.stream else self._collect(send))
            return
        except TimeoutError:
            error = failure if isinstance(failure := self._generation.failure, ApiError) else timed_out()
        except ClientGoneError:
            self._record.status = CLIENT_CLOSED_REQUEST
            self._record.error = "client gone"
            return
        except ApiError as e:
            error = e
        except Exception as e:
            if not self._started:
                raise
            log_crash("stream failed", e, request_id=self._record.request_id)
            error = internal_error()
        except asyncio.CancelledError:
            if self._started:
                await self._send_error(send, overloaded("The server is shutting down."))
            raise
        finally:
            self._generation.close()
        if not self._started:
            raise error
        await self._send_error(send, error)

    async def _stream(self, send: Send, send_body: Send, limit: asyncio.Timeout) -> None:
        shape, options = self._shape, self._options
        opened: set[int] = set()
        while self._open:
            pieces = await self._read()
            parts: list[bytes] = []
            usage = self._running_usage()
            pace = Pace() if len(pieces) > UNPACED_PIECES else None
            for index, piece in pieces.items():
                if index not in opened:
                    opened.add(index)
                    parts += await _collected(shape.opening(index, self._prompts[index // self._n], usage))
                parts.append(shape.chunk(index, piece, usage))
                choice = self._choices[index]
                if choice.finish_reason is not None:
                    parts += await _collected(shape.closing(index, choice, usage))
                if pace is not None:
                    await pace.yield_to_loop()
            if not pieces:
                parts.append(PING)
            if not self._open:
                parts += await _collected(shape.ending(self._usage().as_dict() if options.usage else None))
            data = b"".join(parts) if len(parts) <= UNPACED_PIECES else b""
            if not data and not any(parts):
                continue
            pieces.clear()  # which frees their log probabilities
            async for group, last in _grouped([data] if data else parts):
                more = bool(self._open) or not last
                with self._generation.writing(limit):
                    if not self._started:
                        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                        self._started = True
                    await send_body({"type": "http.response.body", "body": one_line_each(group), "more_body": more})
                self._inside_event = not last

    async def _send_error(self, send: Send, error: ApiError) -> None:
        """End a stream with an error event. If it cannot be written in time, the client sees an unfinished stream."""
        self._record.error = error.code or error.type
        if self._inside_event:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLOW_READER_TIMEOUT_S if error.code == "slow_reader" else ERROR_WRITE_TIMEOUT_S):
                async for data, last in _grouped(await _collected(self._shape.failure(error))):
                    await send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _collect(self, send: Send) -> None:
        collected: list[list[Piece]] = [[] for _ in self._choices]
        try:
            body = await self._whole_body(collected)
        finally:
            await _free(itertools.chain.from_iterable(collected))
        self._started = True
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % sum(map(len, body)))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for data, last in _grouped(body):
            await send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _whole_body(self, collected: list[list[Piece]]) -> list[bytes]:
        """Wait for the answer, and write it in parts. collected: filled with the pieces of each choice."""
        while self._open:
            for index, piece in (await self._read()).items():
                pieces = collected[index]
                if self._shape.keeps:
                    self._shape.chunk(index, piece, None)
                elif pieces and len(pieces[-1].token_ids) < JOINED_TOKENS:
                    pieces[-1].extend(piece)
                else:
                    pieces.append(piece)
        pace = Pace()
        answers: list[tuple[Choice, Piece]] = []
        for choice, pieces in zip(self._choices, collected, strict=True):
            pieces[:] = [_joined(pieces)]
            answers.append((choice, pieces[0]))
            await pace.yield_to_loop()
        return await _collected(self._shape.body(answers, self._prompts, self._usage().as_dict()))

    async def _read(self) -> dict[int, Piece]:
        """Wait for tokens. Return the new piece of each choice; none after `keepalive_s` without tokens."""
        pieces: dict[int, Piece] = {}
        arrived = await self._generation.read(self._options.keepalive_s)
        pace = Pace() if len(arrived) > UNPACED_PIECES else None
        for index, delta in arrived:
            if pace is not None:
                await pace.yield_to_loop()
            choice = self._choices[index]
            if choice.finish_reason is not None:
                continue
            if delta.HasField("prompt"):
                self._note_prompt(delta.prompt)
                if delta.prompt.logprobs:
                    self._prompts[index // self._n] = delta.prompt
                    self._memory.keep(0, delta.prompt.logprobs, self._n / 2)
                else:
                    self._prompts[index // self._n].CopyFrom(delta.prompt)  # to free the rest of the pod's message
            piece = choice.feed(delta)
            if index in pieces:
                pieces[index].extend(piece)
            else:
                pieces[index] = piece
            if choice.finish_reason is not None:
                self._open -= 1
                self._generation.stop(index)
        if pieces:
            self._note_tokens()
        return pieces

    def _note_prompt(self, prompt: pb.PromptInfo) -> None:
        record = self._record
        record.prefills["prefill" if prompt.disaggregated else "decode"] += 1
        times = prompt.queued_seconds, prompt.prefill_seconds
        # One time that is not finite would make the sums of the metrics NaN for ever.
        if record.first_token is None and all(0 <= seconds < float("inf") for seconds in times):
            record.prefill_queued_s, record.prefill_s = times

    def _note_tokens(self) -> None:
        now, record = time.monotonic(), self._record
        if record.last_token is None:
            record.first_token = now
        else:
            self._inter_token.observe(now - record.last_token)
        record.last_token = now

    def _running_usage(self) -> bytes | None:
        if not self._options.usage:
            return None
        return msgspec.json.encode(self._usage().as_dict()) if self._options.running_usage else b"null"

    def _usage(self) -> Usage:
        return Usage(
            self._record.prompt_tokens,
            sum(choice.tokens for choice in self._choices),
            sum(prompt.cached_tokens for prompt in self._prompts),
            sum(choice.reasoning_tokens for choice in self._choices) if self._choices[0].may_think else None,
        )

    def _fill_record(self) -> None:
        usage = self._usage()
        if self._generation.sent_at is None:
            self._record.prompt_tokens = 0  # no pod has received the prompts
        else:
            self._record.queued_s = self._generation.admitted_at - self._generation.queued_at
            self._record.routed_s = self._generation.sent_at - self._generation.admitted_at
        # Pods have generated the unread tokens of an unfinished answer, too. Without them a client that does not read
        # would use fewer tokens than it makes pods generate.
        self._record.completion_tokens = usage.completion_tokens + (self._generation.unread.tokens if self._open else 0)
        self._record.cached_tokens = usage.cached_tokens
        self._record.retries = self._generation.retries
        self._record.resumes = self._generation.resumes
        self._record.finish_reasons = [choice.finish_reason or "none" for choice in self._choices]

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.fail(ClientGoneError())


async def _collected(parts: Iterable[bytes]) -> list[bytes]:
    """Collect the parts of an answer, and yield to other tasks between them."""
    made, pace = [], Pace()
    for part in parts:
        made.append(part)
        if pace.over:
            await pace.yield_to_loop()
    return made


async def _free(pieces: Iterable[Piece]) -> None:
    """Free log probabilities in slices of time: to free a hundred thousand of them at once takes 50 ms."""
    pace = Pace()
    for piece in pieces:
        while piece.logprobs:
            del piece.logprobs[-JOINED_TOKENS:]
            await pace.yield_to_loop()


async def _grouped(parts: Sequence[bytes]) -> AsyncIterator[tuple[bytes, bool]]:
    """Join parts into bodies of about WRITE_BYTES. Yield each with whether it is the last, and let other tasks run."""
    start = size = 0
    pace = Pace()
    for end, part in enumerate(parts[:-1], start=1):
        size += len(part)
        if size > WRITE_BYTES:
            yield b"".join(parts[start:end]), False
            await pace.yield_to_loop()
            start, size = end, 0
    yield b"".join(parts[start:]), True


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        "".join([piece.text for piece in pieces]),
        [part for piece in pieces for part in piece.parts or ()] if pieces and pieces[0].parts is not None else None,
        [token_id for piece in pieces for token_id in piece.token_ids],
        [token for piece in pieces for token in piece.logprobs],
        [offset for piece in pieces for offset in piece.offsets],
    )
