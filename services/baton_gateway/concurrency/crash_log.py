"""Logs exceptions by their type and stack only, because their text may quote a prompt."""

import asyncio
import logging
import traceback
from types import TracebackType
from typing import Any

from baton_common.logging import JsonFormatter

log = logging.getLogger(__name__)

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def log_crash(message: str, error: BaseException, **fields: Any) -> None:
    """Log an unexpected exception. message: must not quote the exception. fields: more fields of the log line."""
    log.error(message, extra={**fields, "exception_type": type(error).__name__, "stack": _frames(error)})


def loop_crashed(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors of the event loop as asyncio's own handler does, but without the callbacks and tasks it quotes."""
    error = context.get("exception")
    if error is None:
        log.error("error in the event loop: %s", context["message"])
    else:
        log_crash("exception in the event loop", error)


class CrashFormatter(JsonFormatter):
    """Formats the exceptions that libraries such as uvicorn and gRPC log: their types and stacks, not their text."""

    def formatException(self, ei: _ExcInfo) -> str:
        chain: list[BaseException] = []
        error = ei[1]
        while error is not None and error not in chain:
            chain.append(error)
            error = error.__cause__ or error.__context__
        return "\n\n".join("\n".join([type(error).__name__, *_frames(error)]) for error in chain)


def _frames(error: BaseException) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
