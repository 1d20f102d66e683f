"""What runs on the pods for one HTTP request."""

import asyncio
import logging
from collections.abc import Sequence

from baton_gateway.decode_link import DecodeLink
from baton_gateway.errors import ApiError, bad_request, internal_error, overloaded
from baton_gateway.fleet import Fleet
from baton_gateway.router import Route
from baton_proto import serving_pb2 as pb

log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client closed its connection."""


class Generation:
    """One or more prompts on the pods, their tokens gathered in one place.

    Choices are numbered through: prompt by prompt, n for each.
    """

    def __init__(self, fleet: Fleet, submits: Sequence[pb.Submit], max_unread_tokens: int) -> None:
        """max_unread_tokens: more tokens than that waiting to be read end the generation."""
        self._n = submits[0].sampling.n
        self._max_unread = max_unread_tokens
        self._unread = 0
        self._arrived: list[tuple[int, pb.Delta]] = []
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._submissions = [_Submission(self, fleet, submit, i * self._n) for i, submit in enumerate(submits)]
        self.retries = 0

    def start(self) -> None:
        """Send every prompt to a decode pod. Raises ApiError when there is none."""
        try:
            for submission in self._submissions:
                submission.start()
        except ApiError:
            self.close()
            raise

    async def read(self, timeout_s: float) -> list[tuple[int, pb.Delta]]:
        """Wait for tokens, and return all that came, each with the number of its choice; none after `timeout_s`.

        Raises ApiError when a prompt failed, ClientGoneError when the client left.
        """
        if not self._arrived and self._failure is None:
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._reader
            finally:
                timer.cancel()
                self._reader = None
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._unread = 0
            return arrived
        if self._failure is not None:
            raise self._failure
        return []

    def stop(self, choice: int) -> None:
        """Ask for no more tokens of a choice."""
        self._submissions[choice // self._n].stop(choice % self._n)

    def fail(self, failure: Exception) -> None:
        """End everything; the reader gets `failure` after what came before it."""
        if self._failure is None:
            self._failure = failure
        self.close()
        self._wake()

    def close(self) -> None:
        """Cancel what still runs."""
        for submission in self._submissions:
            submission.cancel()

    def put(self, choice: int, delta: pb.Delta) -> None:
        self._arrived.append((choice, delta))
        self._unread += len(delta.token_ids)
        if self._unread > self._max_unread:
            # What was not read is lost to the client anyway: give its memory back with the pod's blocks.
            self._arrived.clear()
            self.fail(ApiError(408, "The stream was read too slowly.", code="slow_reader"))
        else:
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _Submission:
    """One prompt and the pod that works on it."""

    def __init__(self, generation: Generation, fleet: Fleet, submit: pb.Submit, first_choice: int) -> None:
        self._generation = generation
        self._fleet = fleet
        self._submit = submit
        self._first_choice = first_choice
        self._open = set(range(submit.sampling.n))
        self._begun = False
        self._tried: list[str] = []
        self._route: Route | None = None
        self._link: DecodeLink | None = None

    def start(self) -> None:
        self._route, self._link = self._fleet.dispatch(len(self._submit.prompt_token_ids), self._tried)
        self._tried.append(self._route.decode.address)
        self._submit.prefill_address = "" if self._route.prefill is None else self._route.prefill.address
        self._link.submit(self._submit, self)

    def deliver(self, delta: pb.Delta) -> bool:
        if delta.finish_reason == pb.FINISH_REASON_ERROR:
            self._leave()
            self._failed(delta.failure)
            return True
        if not self._begun:
            self._begun = True
            if self._route is not None:
                self._route.prefilled()
        if delta.choice not in self._open:
            return False
        self._generation.put(self._first_choice + delta.choice, delta)
        if delta.finish_reason != pb.FINISH_REASON_NONE:
            self._open.discard(delta.choice)
            if not self._open:
                self._release()
        return not self._open

    def lost(self) -> None:
        self._release()
        if self._open:
            self._retry(overloaded("The decode pod was lost."))

    def stop(self, choice: int) -> None:
        if choice not in self._open:
            return
        self._open.discard(choice)
        if not self._open:
            self.cancel()
        elif self._link is not None:
            self._link.cancel_choice(self._submit.handle, choice)

    def cancel(self) -> None:
        self._open.clear()
        self._leave()

    def _leave(self) -> None:
        if self._route is not None and self._link is not None:
            self._link.cancel(self._submit.handle)
        self._release()

    def _failed(self, failure: pb.Failure) -> None:
        if failure.code == pb.Failure.CODE_INVALID:
            self._generation.fail(bad_request(failure.message, failure.param or None))
        elif failure.code == pb.Failure.CODE_UNAVAILABLE:
            self._retry(overloaded(failure.message or "The decode pod cannot take the request now."))
        else:
            log.error(
                "pod failed on a request", extra={"request_id": self._submit.request_id, "reason": failure.message}
            )
            self._generation.fail(internal_error())

    def _retry(self, otherwise: ApiError) -> None:
        """Start again on another pod, once and only when the client has seen nothing of this prompt."""
        if self._begun or len(self._tried) > 1:
            self._generation.fail(otherwise)
            return
        try:
            self.start()
        except ApiError:
            self._generation.fail(otherwise)
        else:
            self._generation.retries += 1

    def _release(self) -> None:
        if self._route is not None:
            self._route.done()
            self._route = None
