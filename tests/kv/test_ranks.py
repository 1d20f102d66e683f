"""A prefill and a decode with different numbers of ranks: each rank has the KV heads of its share of the model."""

import pytest
import torch

from baton_common.extent import Extent, Missing
from baton_common.kv_layout import KvLayout, Plane
from baton_engine.kv_cache import KvCache
from baton_engine.ops import TORCH
from baton_kv.pieces import decode, encode, make_header

NUM_LAYERS, NUM_HEADS, HEAD_DIM, NUM_TOKENS = 3, 8, 16, 75


class Rank:
    """One rank's cache: heads [first, first + count) of the model, in blocks of its own size, in any order."""

    def __init__(self, index: int, ranks: int, block_size: int) -> None:
        self.count = NUM_HEADS // ranks
        self.first = index * self.count
        planes = (Plane(name, self.count, HEAD_DIM, "bfloat16") for name in ("key", "value"))
        self.cache = KvCache(KvLayout(NUM_LAYERS, tuple(planes)), block_size, torch.device("cpu"), TORCH)
        self.cache.allocate(NUM_TOKENS // block_size + 9)
        self.blocks = torch.randperm(self.cache.num_blocks)[: -(-NUM_TOKENS // block_size)].tolist()
        self.missing = Missing([self.extent(0, NUM_TOKENS, self.first, self.count)])

    def extent(self, first_token: int, num_tokens: int, first_head: int, num_heads: int) -> Extent:
        return Extent(
            first_token=first_token,
            num_tokens=num_tokens,
            first_layer=0,
            num_layers=NUM_LAYERS,
            first_head=first_head,
            num_heads=num_heads,
        )

    def own(self, extent: Extent) -> Extent:
        """Return an extent with this rank's numbers of its heads."""
        return self.extent(extent.first_token, extent.num_tokens, extent.first_head - self.first, extent.num_heads)

    def send(self, first_token: int, num_tokens: int, to: "Rank") -> bytes | None:
        """Return the piece of some tokens that another rank needs of this one, if there is any."""
        first, end = max(self.first, to.first), min(self.first + self.count, to.first + to.count)
        if first >= end:
            return None
        extent = self.extent(first_token, num_tokens, first, end - first)
        values = torch.empty(self.cache.layout.size(self.own(extent)), dtype=torch.uint8)
        self.cache.gather([self.blocks], self.own(extent), values)
        return encode(make_header(1, 2, 3, extent), values.numpy().tobytes())

    def receive(self, message: bytes) -> None:
        piece = decode(message)
        extent = piece.extent
        assert self.missing.lacks(extent)
        self.missing.remove(extent)
        values = torch.frombuffer(bytearray(piece.payload), dtype=torch.uint8)
        self.cache.scatter([self.blocks], self.own(extent), values)

    def kv(self) -> torch.Tensor:
        """Return [layers, 2, tokens, heads, head_dim] of the prompt."""
        out = torch.empty(NUM_LAYERS, 2, NUM_TOKENS, self.count, HEAD_DIM, dtype=torch.bfloat16)
        self.cache.gather([self.blocks], self.extent(0, NUM_TOKENS, 0, self.count), out.view(-1).view(torch.uint8))
        return out


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (1, 2), (2, 1), (2, 4), (8, 2)])
@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 16), (64, 16), (16, 48)])
def test_every_bit_arrives(prefills: int, decodes: int, prefill_block: int, decode_block: int) -> None:
    torch.manual_seed(prefills * 10 + decodes)
    senders = [Rank(index, prefills, prefill_block) for index in range(prefills)]
    receivers = [Rank(index, decodes, decode_block) for index in range(decodes)]
    for sender in senders:
        for plane in sender.cache.planes:
            plane.normal_()
    for receiver in receivers:
        for plane in receiver.cache.planes:
            plane.fill_(torch.nan)
    at = 0
    for count in (32, 16, 20, NUM_TOKENS - 68):
        for sender in senders:
            for receiver in receivers:
                message = sender.send(at, count, receiver)
                if message is not None:
                    receiver.receive(message)
        at += count
    assert not any(receiver.missing for receiver in receivers)
    sent, received = (torch.cat([rank.kv() for rank in ranks], dim=3) for ranks in (senders, receivers))
    assert torch.equal(sent, received)
    for receiver in receivers:
        others = set(range(receiver.cache.num_blocks)) - set(receiver.blocks)
        for plane in receiver.cache.planes:
            assert plane[:, sorted(others)].isnan().all(), "a block of somebody else was written"
