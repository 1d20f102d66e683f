"""Staging slots are shared so that no decode pod waits for another one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_common.extent import Extent
from baton_engine.exports import Export
from baton_worker.export_queue import ExportQueue

LAYERS = 4


def make_queue(num_slots: int = 8, slot_tokens: int = 32, block_size: int = 16) -> ExportQueue:
    return ExportQueue(num_slots, slot_tokens * LAYERS, block_size)


def make_export(id: int, first_token: int = 0, num_tokens: int = 1, num_layers: int = LAYERS) -> Export:
    extent = Extent(
        first_token=first_token, num_tokens=num_tokens, first_layer=0, num_layers=num_layers, first_head=0, num_heads=1
    )
    return Export(id, extent, [[id]])


def taken(queue: ExportQueue) -> list[tuple[int, int, int]]:
    """Take all there is; return (id, first token, tokens) of each."""
    pieces = []
    while (next_one := queue.take()) is not None:
        export, _ = next_one
        assert export.tables == [[export.id]]
        pieces.append((export.id, export.extent.first_token, export.extent.num_tokens))
    return pieces


def test_a_long_export_comes_in_parts() -> None:
    queue = make_queue()
    queue.put(0, make_export(1, first_token=10, num_tokens=60))
    # The second part begins with a block.
    assert taken(queue) == [(1, 10, 22), (1, 32, 32), (1, 64, 6)]


def test_a_slot_holds_more_tokens_of_fewer_layers() -> None:
    queue = make_queue()
    queue.put(0, make_export(1, num_tokens=150, num_layers=1))
    assert taken(queue) == [(1, 0, 128), (1, 128, 22)]


def test_a_block_larger_than_a_slot_is_cut() -> None:
    queue = make_queue(slot_tokens=10, block_size=16)
    queue.put(0, make_export(1, num_tokens=32))
    assert taken(queue) == [(1, 0, 10), (1, 10, 6), (1, 16, 10), (1, 26, 6)]


def test_lanes_take_turns() -> None:
    queue = make_queue()
    for id in range(3):
        queue.put(0, make_export(id))
    for id in range(3, 5):
        queue.put(1, make_export(id))
    assert [id for id, *_ in taken(queue)] == [0, 3, 1, 4, 2]


def test_what_is_dropped_is_not_taken() -> None:
    queue = make_queue()
    queue.put(0, make_export(1))
    queue.put(0, make_export(2))
    queue.drop(1)
    assert [id for id, *_ in taken(queue)] == [2]
    assert not queue.ready


@pytest.mark.parametrize("stuck", [1, 2, 3, 7])
def test_stuck_lanes_leave_slots_for_the_others(stuck: int) -> None:
    queue = make_queue()
    for lane in range(stuck):
        for id in range(20):
            queue.put(lane, make_export(100 * lane + id))
    taken(queue)
    for id in range(50):
        queue.put(99, make_export(10_000 + id))
        export, slot = queue.take() or (None, -1)
        assert export is not None
        assert export.id == 10_000 + id
        queue.free(slot)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 3), st.integers(1, 9)),
            st.just(("take",)),
            st.tuples(st.just("free"), st.integers(0, 7)),
            st.tuples(st.just("drop"), st.integers(0, 30)),
        )
    )
)
def test_every_token_once_and_in_order(moves: list[tuple]) -> None:
    queue, held, came, id = make_queue(4, 2, 2), [], {}, 0
    expected: dict[int, int] = {}
    for move in moves:
        match move:
            case ("put", lane, count):
                id += 1
                expected[id] = count
                queue.put(lane, make_export(id, num_tokens=count))
            case ("take",):
                ready = queue.ready
                one = queue.take()
                assert ready == (one is not None)
                if one is not None:
                    export, slot = one
                    assert slot not in held
                    held.append(slot)
                    assert export.extent.first_token == came.get(export.id, 0)
                    came[export.id] = export.extent.tokens.stop
            case ("free", which) if held:
                queue.free(held.pop(which % len(held)))
            case ("drop", which):
                queue.drop(which)
                expected.pop(which, None)
    while held or queue.ready:
        while (one := queue.take()) is not None:
            export, slot = one
            held.append(slot)
            came[export.id] = came.get(export.id, 0) + export.extent.num_tokens
        while held:
            queue.free(held.pop())
    assert {key: came[key] for key in expected} == expected
