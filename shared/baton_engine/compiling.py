"""Sequences whose grammar is still being compiled. They join the scheduler's queue afterwards."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from .grammars import Grammars
from .matcher import Matcher
from .sampling import Grammar
from .sequence import Sequence, State

_POLL_S = 0.001


class Compiling:
    """Holds these sequences and gives each its matcher once its grammar is compiled."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._entries: list[tuple[Sequence, Future[Matcher]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sequence: Sequence, grammar: Grammar) -> None:
        self._entries.append((sequence, self._grammars.compile(grammar, sequence.request.cache_scope.salt)))

    def take(self, idle: bool) -> Iterator[tuple[Sequence, str]]:
        """Yield each sequence whose compilation has ended, with an error message that is empty on success. Sequences
        that were aborted are dropped. idle: the engine has no other work, so this call may wait for _POLL_S."""
        entries, self._entries = self._entries, []
        wait([compiled for _, compiled in entries], _POLL_S if idle else 0, FIRST_COMPLETED)
        for sequence, compiled in entries:
            if sequence.state is State.FINISHED:
                continue
            if compiled.done():
                yield sequence, _start(sequence, compiled)
            else:
                self._entries.append((sequence, compiled))


def _start(sequence: Sequence, compiled: Future[Matcher]) -> str:
    """Give a sequence its matcher. Returns an error message, empty on success."""
    error = compiled.exception()
    if error is not None:
        return f"The grammar cannot be used: {error}."
    sequence.matcher = compiled.result().copy()
    # A sequence that another engine began has output already, which the matcher must follow first.
    if not sequence.matcher.follow(sequence.output):
        return "The output generated so far does not follow the grammar."
    return ""
