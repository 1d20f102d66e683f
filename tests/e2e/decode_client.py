"""The gateway's end of a stream to a decode pod."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from baton_proto import serving_pb2 as pb
from baton_proto.serving_pb2_grpc import DecodeStub

from .pod import Pod

MAX_TOKENS = 64


class Answer:
    """What has come for one request so far; every token exactly once and in order, or it is an error."""

    def __init__(self, handle: int, choices: Iterable[int], begun: int) -> None:
        """begun: how many tokens of each choice there are already."""
        self.handle = handle
        self.tokens: dict[int, list[int]] = {choice: [] for choice in choices}
        self.logprobs: dict[int, list[pb.TokenLogprobs]] = {choice: [] for choice in self.tokens}
        self._begun = begun
        self.reasons: dict[int, int] = {}
        self.prompt: pb.PromptInfo | None = None
        self.failure: pb.Failure | None = None
        self.failed_prefills: list[str] = []  # addresses
        self.first_token_at: float | None = None
        self._cancelled: set[int] = set()
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    @property
    def done(self) -> bool:
        return self.failure is not None or self.reasons.keys() | self._cancelled == self.tokens.keys()

    @property
    def only(self) -> list[int]:
        """The tokens of a request for one choice."""
        assert len(self.tokens) == 1
        return self.tokens[0]

    async def until(self, condition: Callable[["Answer"], object], timeout_s: float = 60) -> "Answer":
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                if self._error is not None:
                    raise self._error
                self._news.clear()
                await self._news.wait()
        return self

    async def finished(self, timeout_s: float = 60) -> "Answer":
        """Wait for the last token of the last choice; a failure is an error."""
        await self.until(lambda answer: answer.done, timeout_s)
        assert self.failure is None, self.failure
        return self

    def take(self, delta: pb.Delta) -> None:
        assert self.failure is None, f"goes on after its failure: {delta}"
        if delta.HasField("failure"):
            self.failure = delta.failure
        elif delta.choice not in self._cancelled:
            tokens = self.tokens[delta.choice]
            assert delta.choice not in self.reasons, f"the choice goes on after its end: {delta}"
            there = self._begun + len(tokens)
            assert delta.offset == there, f"{there} tokens are there, offset is {delta.offset}"
            tokens += delta.token_ids
            self.logprobs[delta.choice] += delta.logprobs
            self.first_token_at = self.first_token_at or time.monotonic()
            if delta.HasField("prompt"):
                assert self.prompt is None, "the prompt is told of twice"
                self.prompt = delta.prompt
            if delta.finish_reason:
                self.reasons[delta.choice] = delta.finish_reason
        self._news.set()

    def cancel(self, choice: int) -> None:
        """What still comes of a choice counts for nothing."""
        self._cancelled.add(choice)

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._news.set()


class DecodeClient:
    """One Serve stream to a decode pod."""

    def __init__(self, pod: Pod) -> None:
        self._channel = pod.open_channel()
        self._call = DecodeStub(self._channel).Serve(wait_for_ready=True)
        self._handles = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        self._reading = asyncio.create_task(self._read())

    async def __aenter__(self) -> "DecodeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(
        self,
        prompt: Sequence[int],
        *prefills: Pod | str,
        priority: int = 0,
        continuing: tuple[int, list[int]] | None = None,
        cache_scope: pb.CacheScope | None = None,
        **sampling: Any,
    ) -> Answer:
        """Send a request.

        prefills: the pods to prefill it, in the order to be tried; none, or "" = the decode pod itself.
        continuing: a choice, and the tokens that there are of it. sampling: greedy by default.
        """
        params = pb.SamplingParams(
            **{"max_tokens": MAX_TOKENS, "top_p": 1, "repetition_penalty": 1, "n": 1, **sampling}
        )
        first, begun = continuing or (0, [])
        answer = Answer(next(self._handles), range(first, first + params.n), len(begun))
        self._answers[answer.handle] = answer
        submit = pb.Submit(
            handle=answer.handle,
            request_id=f"test-{answer.handle}",
            prompt_token_ids=prompt,
            sampling=params,
            priority=priority,
            cache_scope=cache_scope,
            continuation=pb.Continuation(choice=first, token_ids=begun) if continuing else None,
            prefill_addresses=[
                prefill if isinstance(prefill, str) else prefill.address for prefill in prefills if prefill
            ],
        )
        await self._call.write(pb.GatewayMessage(submit=submit))
        return answer

    async def introduce(self, *prefills: Pod) -> None:
        """Name the prefill pods that requests may be handed to."""
        peers = pb.Peers(prefill_addresses=[prefill.address for prefill in prefills])
        await self._call.write(pb.GatewayMessage(peers=peers))

    async def ask(self, prompt: Sequence[int], *prefills: Pod | str, **sampling: Any) -> Answer:
        """Send a request and wait for its end."""
        return await (await self.submit(prompt, *prefills, **sampling)).finished()

    async def cancel(self, answer: Answer) -> None:
        await self._call.write(pb.GatewayMessage(cancel=pb.Cancel(handle=answer.handle)))
        del self._answers[answer.handle]

    async def cancel_choice(self, answer: Answer, choice: int) -> None:
        answer.cancel(choice)
        await self._call.write(pb.GatewayMessage(cancel=pb.Cancel(handle=answer.handle, choice=choice)))

    async def close(self) -> None:
        """Drop the stream and the connection."""
        self._call.cancel()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close()

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                for failed in message.step.failed_handovers:
                    if failed.handle in self._answers:
                        self._answers[failed.handle].failed_prefills.append(failed.prefill_address)
                for delta in message.step.deltas:
                    answer = self._answers.get(delta.handle)
                    if answer is not None:
                        answer.take(delta)
            raise ConnectionError("the pod ended the stream")
        except Exception as error:
            for answer in self._answers.values():
                answer.fail(error)
