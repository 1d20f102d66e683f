"""Computations of one thread that take turns: while one waits for another process, the next one launches its work."""

from collections.abc import Callable
from typing import TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")


def in_turn(runs: list[Callable[[], T]]) -> list[T]:
    """Return the results of some functions. Whenever one of them calls `give_way`, the next one goes on."""
    turns = [greenlet(run) for run in runs]
    results: dict[int, T] = {}
    while len(results) < len(turns):
        for number, turn in enumerate(turns):
            if number not in results:
                result = turn.switch()
                if turn.dead:
                    results[number] = result
    return [results[number] for number in range(len(turns))]


def give_way() -> None:
    """Let the next function of `in_turn` go on, if this one is part of it. Return when it is this one's turn again."""
    others = getcurrent().parent
    if others is not None:
        others.switch()
