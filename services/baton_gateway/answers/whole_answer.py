"""An answer that is complete before its first byte is sent, and may be large."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..generation.answer_memory import AnswerMemory
from .reply import SLOW_READER_TIMEOUT_S, WRITE_BYTES


class WholeAnswer(Response):
    """JSON that is sent in parts as its client takes them. Until its end it counts for the memory of its tenant.

    As a plain response all of it would lie in the server's buffer, uncounted, for as long as the client does not read.
    """

    def __init__(self, body: bytes, memory: AnswerMemory) -> None:
        super().__init__(body, media_type="application/json")
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._memory.keep_bytes(len(self.body))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(self.body), WRITE_BYTES):
                end = start + WRITE_BYTES
                async with asyncio.timeout(SLOW_READER_TIMEOUT_S):
                    part = bytes(self.body[start:end])
                    await send({"type": "http.response.body", "body": part, "more_body": end < len(self.body)})
        except TimeoutError:
            pass  # the server resets the connection of an answer that is not complete
        finally:
            self._memory.free()
