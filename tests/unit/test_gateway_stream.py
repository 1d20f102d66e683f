"""The messages in which a decode pod sends deltas to a gateway."""

import asyncio

import pytest

from baton_decode.stream import GatewayStream
from baton_proto import serving_pb2 as pb


def delta(handle: int, logprobs: int = 0) -> pb.Delta:
    """A first delta. logprobs: how many prompt tokens have log probabilities with 20 alternatives."""
    token = pb.TokenLogprobs(
        token_id=1, logprob=-1, top_token_ids=range(90_000, 90_020), top_logprobs=[-0.5] * 20, rank=1
    )
    return pb.Delta(handle=handle, token_ids=[7], prompt=pb.PromptInfo(logprobs=[token] * logprobs))


async def test_large_deltas_go_into_several_messages_in_their_order() -> None:
    stream = GatewayStream()
    # Together they are larger than a message may be.
    stream.put([delta(0), delta(1, 100_000), delta(2), *(delta(handle, 130_000) for handle in range(3, 7)), delta(7)])
    messages = []
    while not messages or stream.num_unread:
        messages.append(await stream.next())
        assert stream.unsent
    sizes = [message.ByteSize() for message in messages]
    assert sum(sizes) > 64 << 20
    assert max(sizes) < 32 << 20
    assert [each.handle for message in messages for each in message.step.deltas] == list(range(8))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(stream.next(), 0.05)
    assert not stream.unsent


async def test_all_small_deltas_go_into_one_message() -> None:
    stream = GatewayStream()
    stream.put([delta(handle) for handle in range(500)])
    stream.put([delta(500)])
    stream.put_failed_handover(3, "pod")
    message = await stream.next()
    assert [each.handle for each in message.step.deltas] == list(range(501))
    assert [each.handle for each in message.step.failed_handovers] == [3]
    assert not stream.num_unread
