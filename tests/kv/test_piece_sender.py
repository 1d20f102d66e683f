"""Each staging slot of a piece is freed once, whenever the stream that would send it ends."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from baton_common.extent import Extent
from baton_prefill.piece_sender import PieceSender
from baton_prefill.session import Export, PackedPiece, Session
from baton_proto import handover_pb2 as kv
from baton_worker.messages import FreeSlot

SLOT = 3


class Engine:
    """Notes the slots that are freed, and has the KV of one."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.exports = self.ready = self.layout = self

    def slot(self, index: int, size: int) -> memoryview:
        return memoryview(bytes(size))

    def size(self, extent: Extent) -> int:
        return extent.num_tokens

    def send(self, message: Any) -> None:
        assert isinstance(message, FreeSlot)
        self.freed.append(message.slot)


@pytest.mark.parametrize("turns", range(6))
async def test_a_stream_that_is_cancelled_while_it_takes_a_piece(turns: int) -> None:
    """turns: of the event loop between the arrival of the piece and the end of the stream."""
    engine, session, loop = Engine(), Session(1, epoch=2), asyncio.get_running_loop()
    ticket = kv.Ticket(ticket_id=5)
    export = Export(ticket, 1, loop.call_later(60, print), None, None)  # type: ignore[arg-type]
    session.exports[5] = export
    messages = PieceSender(engine).messages(session)  # type: ignore[arg-type]
    sending = asyncio.create_task(anext(messages))
    await asyncio.sleep(0.01)
    extent = Extent(first_token=0, num_tokens=8, first_layer=0, num_layers=1, first_head=0, num_heads=1)
    session.pieces.put_nowait(PackedPiece(export, extent, SLOT, on_gpu=False, checksum=None))
    for _ in range(turns):
        await asyncio.sleep(0)
    sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending
    await messages.aclose()
    assert engine.freed == [SLOT]
    assert not session.pieces.qsize()
