"""KV of every layout goes from one cache to another as pieces on the wire, and only what fits the layout is taken."""

import random

import pytest
import torch

from baton_common.extent import Extent, Missing
from baton_common.kv_layout import KvLayout, Plane
from baton_engine.kv_cache import KvCache
from baton_engine.ops import TORCH
from baton_kv.pieces import PieceBounds, PieceRefused, decode, encode, make_header

TOKENS = 75
LAYOUTS = {
    "keys and values": KvLayout(3, (Plane("key", 4, 16, "bfloat16"), Plane("value", 4, 16, "bfloat16"))),
    "latent": KvLayout(3, (Plane("latent", 1, 72, "bfloat16"),)),
    "8 bits with scales": KvLayout(
        2,
        (
            Plane("key", 2, 16, "uint8"),
            Plane("key_scale", 2, 1, "float32"),
            Plane("value", 2, 24, "uint8"),
            Plane("value_scale", 2, 1, "float32"),
        ),
    ),
    "layers with and without a window": KvLayout(
        7, (Plane("key", 2, 8, "float32"), Plane("value", 2, 4, "bfloat16")), (9, 9, None, 9, 9, None, 9)
    ),
    "heads of two sizes": KvLayout(
        3,
        (Plane("key", 4, 16, "float32"), Plane("value", 4, 16, "float32")),
        (9, None, 9),
        ((4, 12, 12), (2, 24, 24), (4, 12, 12)),
    ),
    "values of another size": KvLayout(
        3,
        (Plane("key", 4, 24, "bfloat16"), Plane("value", 4, 16, "bfloat16")),
        (9, None, 9),
        ((4, 24, 16), (2, 24, 16), (4, 24, 16)),
    ),
    "a vector beside heads": KvLayout(2, (Plane("key", 4, 8, "float32"), Plane("index", 1, 12, "float16"))),
}


def make_cache(layout: KvLayout, block_size: int) -> tuple[KvCache, list[list[int]]]:
    """Return a cache and block tables in it, one for each group of layers, for TOKENS tokens."""
    cache, blocks, groups = (
        KvCache(layout, block_size, torch.device("cpu"), TORCH),
        -(-TOKENS // block_size),
        layout.groups,
    )
    cache.allocate(blocks * len(groups) + 9)
    order = torch.randperm(cache.num_blocks).tolist()
    return cache, [order[first * blocks : (first + 1) * blocks] for first in range(len(groups))]


def content(cache: KvCache, tables: list[list[int]], extent: Extent) -> torch.Tensor:
    values = torch.empty(cache.layout.size(extent), dtype=torch.uint8)
    total = cache.gather(tables, extent, values, check=True)
    assert int(total) == int(cache.checksum(values))
    return values


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("sender_block", "receiver_block"), [(16, 16), (64, 16), (16, 48)])
def test_every_bit_arrives(name: str, sender_block: int, receiver_block: int) -> None:
    layout = LAYOUTS[name]
    sender, there = make_cache(layout, sender_block)
    receiver, here = make_cache(layout, receiver_block)
    for plane in sender.planes:
        plane.copy_((torch.rand(plane.shape) * 200 + 1).to(plane.dtype))
    whole = layout.extent(0, TOKENS)
    bounds, missing = PieceBounds(layout, most_bytes=1 << 20), Missing([whole])
    rng, at, spent = random.Random(3), 0, 0
    while at < TOKENS:
        count = rng.randint(1, TOKENS - at)
        middle = rng.randint(1, layout.num_layers - 1)
        cut = rng.randint(0, layout.num_heads)
        # Parts of the layers and of the heads, in any order.
        parts = [
            Extent(
                first_token=at,
                num_tokens=count,
                first_layer=layers.start,
                num_layers=layers.stop - layers.start,
                first_head=heads.start,
                num_heads=heads.stop - heads.start,
            )
            for layers in (slice(0, middle), slice(middle, layout.num_layers))
            for heads in (slice(0, cut), slice(cut, layout.num_heads))
            if heads.start < heads.stop
        ]
        rng.shuffle(parts)
        for extent in parts:
            piece = decode(encode(make_header(1, 2, 3, extent), content(sender, there, extent).numpy().tobytes()))
            bounds.check(piece)
            assert missing.lacks(piece.extent)
            missing.remove(piece.extent)
            receiver.scatter(here, piece.extent, torch.frombuffer(bytearray(piece.payload), dtype=torch.uint8))
            spent += len(piece.payload)
        at += count
    assert not missing
    assert spent == layout.size(whole) == TOKENS * layout.token_bytes
    assert torch.equal(content(sender, there, whole), content(receiver, here, whole))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("fields", [{"num_layers": 4}, {"num_heads": 5}, {"num_tokens": 6}, {"num_tokens": 4}])
def test_a_piece_of_another_extent_than_its_bytes_is_refused(name: str, fields: dict[str, int]) -> None:
    layout = LAYOUTS[name]
    extent = layout.extent(0, 5)
    payload = bytes(layout.size(extent))
    PieceBounds(layout, most_bytes=1 << 20).check(decode(encode(make_header(1, 2, 3, extent), payload)))
    header = make_header(1, 2, 3, extent)
    for field, value in fields.items():
        setattr(header, field, value)
    with pytest.raises(PieceRefused, match="range"):
        PieceBounds(layout, most_bytes=1 << 20).check(decode(encode(header, payload)))


def test_copies_of_blocks_take_all_planes_along() -> None:
    cache, _ = make_cache(LAYOUTS["8 bits with scales"], 16)
    for plane in cache.planes:
        plane.copy_((torch.rand(plane.shape) * 200 + 1).to(plane.dtype))
    before = [plane.clone() for plane in cache.planes]
    cache.copy([(1, 5), (2, 6)])
    for plane, old in zip(cache.planes, before, strict=True):
        assert torch.equal(plane[:, [5, 6]], old[:, [1, 2]])
        assert torch.equal(plane[:, :5], old[:, :5])


def test_groups_have_one_size_and_one_window() -> None:
    # The pattern of Gemma 3: five layers with a window, then one without.
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    layout = KvLayout(34, (Plane("key", 1, 8, "bfloat16"),), windows)
    groups = layout.groups
    assert [group.window for group in groups] == [None, 1024, 1024, 1024, 1024, 1024, 1024]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(34))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert (layout.depth, max(len(group.layers) for group in groups)) == (5, 5)
    # Neighbours with a window lie together.
    assert [(run.first_layer, run.num_layers) for run in layout.runs(slice(0, 12))] == [(0, 5), (5, 1), (6, 5), (11, 1)]
    # One layer among many of another kind does not lead to a table for each layer.
    lone = KvLayout(64, layout.planes, (None,) + (1024,) * 63)
    assert (lone.depth, len(lone.groups)) == (8, 9)
    assert KvLayout(5, layout.planes).groups == KvLayout(5, layout.planes, (None,) * 5).groups


@pytest.mark.parametrize(("first", "count"), [(0, 4), (0, 9), (0, 10), (3, 30), (30, 3), (0, 0)])
def test_tokens_that_no_later_query_sees_are_not_handed_over(first: int, count: int) -> None:
    layout = LAYOUTS["layers with and without a window"]
    end = first + count
    cells = {(layer, token) for part in layout.seen(first, count) for layer in range(7)[part.layers]
             for token in range(end)[part.tokens]}  # fmt: skip
    windows = [layout.windows[layer] or 10**9 for layer in range(7)]
    # The next query is at position `end` and sees itself, too.
    assert cells == {
        (layer, token) for layer in range(7) for token in range(first, end) if end - token < windows[layer]
    }
    assert sum(part.num_layers * part.num_tokens for part in layout.seen(first, count)) == len(cells)
