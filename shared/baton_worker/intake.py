"""Reads a peer's messages: acts on valid ones, refuses others, and ends the stream after too many violations."""

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
    """Reads the messages of one kind of stream."""

    def __init__(self, engine: EngineClient, refusals: PeerRefusals) -> None:
        self._engine = engine
        self._refusals = refusals

    async def first(self, messages: AsyncIterator[_Message], context: Any) -> _Message | None:
        """Return a stream's first message; None when there is none. Ends the call when it cannot be parsed."""
        try:
            return await anext(messages, None)
        except DecodeError:
            refusal = self._unreadable(context.peer())
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
            return None

    async def read(
        self, messages: AsyncIterator[_Message], act: Callable[[_Message], None], peer: str
    ) -> tuple[grpc.StatusCode, str] | None:
        """Pass every message to `act` until the stream ends.

        Return the status with which the call must end; None when the peer has ended the stream.

        act: raises MessageRefused for a message that it does not act on.
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
                # A defect of this program must not end other peers' streams. The error's text may quote a prompt.
                log.error(
                    "a message from %s could not be handled: %s", peer, type(error).__name__,
                    extra={"event": "message_failed"},
                )  # fmt: skip
                return grpc.StatusCode.INTERNAL, "the message could not be handled"
            # A peer that sends faster than the engine takes commands must wait, or its messages would pile up here.
            await self._engine.drained()

    def _unreadable(self, peer: str) -> MessageRefused:
        refusal = MessageRefused("unreadable", "message", "cannot be parsed")
        self._refusals.add_message(peer, refusal)
        return refusal


async def conclude(reader: "asyncio.Task[tuple[grpc.StatusCode, str] | None]", context: Any) -> None:
    """End a call with the status that its finished reader has returned."""
    verdict = None if reader.cancelled() or reader.exception() is not None else reader.result()
    if verdict is not None:
        await context.abort(*verdict)
