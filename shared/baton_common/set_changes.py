"""What has changed in a set since its follower was last told."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class SetChanges(Generic[K]):
    """Members gained and lost, net: what came and went in between is in neither.

    So it never holds more than the set and what its follower knows of it, however long nobody takes anything.
    """

    def __init__(self, gained: Iterable[K] = ()) -> None:
        self.gained = set(gained)
        self.lost: set[K] = set()

    def gain(self, member: K) -> None:
        """Note a new member of the set."""
        if member in self.lost:
            self.lost.remove(member)
        else:
            self.gained.add(member)

    def lose(self, member: K) -> None:
        """Note that a member left the set."""
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
