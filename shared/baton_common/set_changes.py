"""The changes of a set since its follower last took them."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class SetChanges(Generic[K]):
    """The net changes: a member that was gained and lost again since the last `take` is in neither set.

    So the size is bounded by the set and the follower's copy of it, even if the follower never calls `take`.
    """

    def __init__(self, gained: Iterable[K] = ()) -> None:
        self.gained = set(gained)
        self.lost: set[K] = set()

    def gain(self, member: K) -> None:
        """Record a new member of the set."""
        if member in self.lost:
            self.lost.remove(member)
        else:
            self.gained.add(member)

    def lose(self, member: K) -> None:
        """Record that a member left the set."""
        if member in self.gained:
            self.gained.remove(member)
        else:
            self.lost.add(member)

    def take(self, limit: int) -> tuple[list[K], list[K]]:
        """Return (gained, lost) since the last call, at most `limit` together; the rest stays for the next call."""
        lost = _pop(self.lost, limit)
        return _pop(self.gained, limit - len(lost)), lost


def _pop(members: set[K], limit: int) -> list[K]:
    return [members.pop() for _ in range(min(limit, len(members)))]
