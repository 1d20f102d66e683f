"""Reads what a peer sends on a stream: acts on sound messages, refuses others, and ends the stream of a broken peer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from baton_common.peer_refusals import MessageRefused, PeerRefusals

from .engine_client import EngineClient

log = logging.getLogger(__name__)

# Violations after which a stream is closed. A single one may be a bug that concerns one request only.
MOST_VIOLATIONS = 16

_Message = TypeVar("_Message")


class Intake:
    """The entry of one kind of stream."""

    def __init__(self, engine: EngineClient, refusals: PeerRefusals) -> None:
        self._engine = engine
        self._refusals = refusals

    async def first(self, messages: AsyncIterator[_Message], context: Any) -> _Message | None:
        """Return a stream's first message, None where there is none. Ends the call when it cannot be read."""
        try:
            return await anext(messages, None)
        except DecodeError:
            refusal = self._unreadable(context.peer())
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
            return None

    async def read(
        self, messages: AsyncIterator[_Message], act: Callable[[_Message], None], peer: str
    ) -> tuple[grpc.StatusCode, str] | None:
        """Give every message to `act` until the stream ends; return how to end the call, None = as the peer ended it.

        act: raises MessageRefused for what it does not act on.
        """
        violations = 0
        while True:
            try:
                message = await anext(messages)
            except StopAsyncIteration:
                return None
            except DecodeError:
                return grpc.StatusCode.INVALID_ARGUMENT, str(self._unreadable(peer))
            try:
                act(message)
            except MessageRefused as refusal:
                self._refusals.add_message(peer, refusal)
                violations += refusal.is_violation
                if violations >= MOST_VIOLATIONS:
                    return grpc.StatusCode.INVALID_ARGUMENT, str(refusal)
            except Exception as error:
                # A defect here. It must not reach the streams of other peers; the text may quote a prompt.
                log.error(
                    "a message of %s could not be handled: %s", peer, type(error).__name__,
                    extra={"event": "message_failed"},
                )  # fmt: skip
                return grpc.StatusCode.INTERNAL, "the message could not be handled"
            # A peer that sends faster than the engine takes commands must wait, instead of filling this process.
            await self._engine.drained()

    def _unreadable(self, peer: str) -> MessageRefused:
        refusal = MessageRefused("unreadable", "message", "cannot be parsed")
        self._refusals.add_message(peer, refusal)
        return refusal


async def conclude(reader: "asyncio.Task[tuple[grpc.StatusCode, str] | None]", context: Any) -> None:
    """End a call as its finished reader demands."""
    verdict = None if reader.cancelled() or reader.exception() is not None else reader.result()
    if verdict is not None:
        await context.abort(*verdict)
