"""Staging slots are shared so that no decode pod waits for another one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.engine import Export
from baton_worker.export_queue import ExportQueue


def taken(queue: ExportQueue, limit: int = 4) -> list[tuple[int, int, list[int]]]:
    """Take all there is; return (id, first block, blocks) of each."""
    pieces = []
    while (next_one := queue.take(limit)) is not None:
        export, _ = next_one
        pieces.append((export.id, export.first_block, export.blocks))
    return pieces


def test_a_long_export_comes_in_parts() -> None:
    queue = ExportQueue(8)
    queue.put(0, Export(1, 10, [7, 8, 9]))
    assert taken(queue, limit=2) == [(1, 10, [7, 8]), (1, 12, [9])]


def test_lanes_take_turns() -> None:
    queue = ExportQueue(8)
    for id in range(3):
        queue.put(0, Export(id, 0, [id]))
    for id in range(3, 5):
        queue.put(1, Export(id, 0, [id]))
    assert [id for id, *_ in taken(queue)] == [0, 3, 1, 4, 2]


def test_what_is_dropped_is_not_taken() -> None:
    queue = ExportQueue(8)
    queue.put(0, Export(1, 0, [1]))
    queue.put(0, Export(2, 0, [2]))
    queue.drop(1)
    assert [id for id, *_ in taken(queue)] == [2]
    assert not queue.ready


@pytest.mark.parametrize("stuck", [1, 2, 3, 7])
def test_stuck_lanes_leave_slots_for_the_others(stuck: int) -> None:
    queue = ExportQueue(8)
    for lane in range(stuck):
        for id in range(20):
            queue.put(lane, Export(100 * lane + id, 0, [id]))
    taken(queue)
    for id in range(50):
        queue.put(99, Export(10_000 + id, 0, [id]))
        export, slot = queue.take(4) or (None, -1)
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
def test_every_block_once_and_in_order(moves: list[tuple]) -> None:
    queue, held, came, id = ExportQueue(4), [], {}, 0
    expected: dict[int, list[int]] = {}
    for move in moves:
        match move:
            case ("put", lane, count):
                id += 1
                expected[id] = list(range(count))
                queue.put(lane, Export(id, 0, list(range(count))))
            case ("take",):
                ready = queue.ready
                one = queue.take(2)
                assert ready == (one is not None)
                if one is not None:
                    export, slot = one
                    assert slot not in held
                    held.append(slot)
                    assert export.first_block == len(came.setdefault(export.id, []))
                    came[export.id] += export.blocks
            case ("free", which) if held:
                queue.free(held.pop(which % len(held)))
            case ("drop", which):
                queue.drop(which)
                expected.pop(which, None)
    while held or queue.ready:
        while (one := queue.take(2)) is not None:
            export, slot = one
            held.append(slot)
            came.setdefault(export.id, []).extend(export.blocks)
        while held:
            queue.free(held.pop())
    assert {key: came[key] for key in expected} == expected
