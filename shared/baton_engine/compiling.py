"""Sequences whose grammar is still being compiled, which the scheduler does not know yet."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from .grammars import Grammars
from .matcher import Matcher
from .sampling import Grammar
from .sequence import Sequence, State

_POLL_S = 0.001


class Compiling:
    """Gives each sequence its matcher as soon as there is one."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._entries: list[tuple[Sequence, Future[Matcher]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sequence: Sequence, grammar: Grammar) -> None:
        self._entries.append((sequence, self._grammars.compile(grammar, sequence.request.cache_scope.salt)))

    def take(self, idle: bool) -> Iterator[tuple[Sequence, str]]:
        """Yield the sequences that wait no longer and have not ended meanwhile, each with what is wrong with its
        grammar, if anything. idle: there is nothing else to do, so that waiting a moment costs nobody any time."""
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
    """Give a sequence its matcher, or return why it can have none."""
    error = compiled.exception()
    if error is not None:
        return f"The grammar cannot be used: {error}."
    sequence.matcher = compiled.result().copy()
    # What another engine has generated is read first.
    if not sequence.matcher.follow(sequence.output):
        return "The tokens that are there already do not follow the grammar."
    return ""
