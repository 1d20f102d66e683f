"""A fair queue over tenants: a large backlog of one tenant does not delay the requests of the others."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Waiting(Generic[Item]):
    __slots__ = ("cost", "item", "order", "start")

    def __init__(self, start: float, cost: float, item: Item, order: int) -> None:
        self.start = start
        self.cost = cost
        self.item = item
        self.order = order


class _TenantQueue(Generic[Item]):
    """The waiting requests of one tenant at one priority, sorted by the tenant's own order and then by arrival."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.waiting: deque[_Waiting[Item]] = deque()
        self.finish = 0.0  # the virtual time at which its last request would be served

    @property
    def backlog(self) -> float:
        return sum(entry.cost for entry in self.waiting) / self.weight

    @property
    def places(self) -> float:
        """The places that the tenant's requests take in the queue, in proportion to its weight."""
        return len(self.waiting) / self.weight

    def place(self, order: int) -> int:
        """Return how many waiting requests go before a new request of this order."""
        return next((at for at, entry in enumerate(self.waiting) if entry.order > order), len(self.waiting))

    def start(self, place: int, now: float) -> float:
        """Return the virtual time at which a new request in that place would start."""
        return self.waiting[place].start if place < len(self.waiting) else max(now, self.finish)

    def insert(self, now: float, cost: float, item: Item, order: int) -> None:
        place = self.place(order)
        start, share = self.start(place, now), cost / self.weight
        # Each overtaken request starts later by the share of the new request. The order therefore gives the tenant no
        # more of the capacity.
        for later in itertools.islice(self.waiting, place, None):
            later.start += share
        self.finish = share + (start if place == len(self.waiting) else self.finish)
        self.waiting.insert(place, _Waiting(start, cost, item, order))


class FairQueue(Generic[Item]):
    """Start-time fair queueing (Goyal, Vin and Cheng, IEEE/ACM Transactions on Networking 5(5), 1997) over tenants.

    More urgent priorities are served first. Within a priority, each tenant with waiting requests gets a share of the
    capacity in proportion to its weight, however many requests the others send. Capacity that a tenant does not use
    goes to the others. When the queue is full, the tenant with the most requests for its weight, at the least urgent
    priority, loses its last request.
    """

    def __init__(self, capacity: int) -> None:
        """capacity: how many requests may wait."""
        self._capacity = capacity
        self._queues: dict[tuple[int, str], _TenantQueue[Item]] = {}  # by priority and tenant
        self._now: dict[int, float] = {}  # virtual time by priority
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        """All waiting items, in no order."""
        return (entry.item for queue in self._queues.values() for entry in queue.waiting)

    def push(
        self, tenant: str, item: Item, cost: float, weight: float = 1.0, priority: int = 0, order: int = 0
    ) -> Item | None:
        """Add an item. When the queue is full, return the item that has to leave, which may be the new one.

        cost: the cost of serving the item, in any unit. priority: among tenants; a lower number is more urgent.
        order: among items of the same tenant and priority; a lower number goes first.
        """
        queue = self._queues.setdefault((priority, tenant), _TenantQueue(weight))
        queue.weight = weight
        queue.insert(self._now.get(priority, 0.0), cost, item, order)
        self._length += 1
        if self._length <= self._capacity:
            return None
        # Places are scarce here, not capacity: many cheap requests of one tenant must not keep out a costly one.
        return self._push_out(lambda queue: (queue.places, queue.backlog))

    def pop(self, can_serve: Callable[[Item], bool] = lambda _item: True) -> Item | None:
        """Remove and return the item whose turn it is; None if no item waits or none can be served now.

        can_serve: whether an item can be served now. An item that cannot be served keeps its turn. Until it is served,
        only items that start before its virtual finish time may overtake it, since they would have been served beside
        it.
        """
        turns = sorted((key[0], self._queues[key].waiting[0].start, key[1]) for key in self._waiting())
        end = float("inf")
        for priority, start, tenant in turns:
            if priority > turns[0][0] or start >= end:
                break
            queue = self._queues[priority, tenant]
            entry = queue.waiting[0]
            if can_serve(entry.item):
                queue.waiting.popleft()
                self._now[priority] = max(self._now.get(priority, 0.0), start)
                self._removed((priority, tenant))
                return entry.item
            end = min(end, start + entry.cost / queue.weight)
        return None

    def remove(self, tenant: str, item: Item, priority: int = 0) -> bool:
        """Remove an item that no longer waits; return whether it was found. Its tenant's later items move up."""
        queue = self._queues.get((priority, tenant))
        entry = next((entry for entry in queue.waiting if entry.item is item), None) if queue is not None else None
        if queue is None or entry is None:
            return False
        index = queue.waiting.index(entry)
        del queue.waiting[index]
        for later in itertools.islice(queue.waiting, index, None):
            later.start -= entry.cost / queue.weight
        queue.finish -= entry.cost / queue.weight
        self._removed((priority, tenant))
        return True

    def ahead(self, tenant: str, cost: float, weight: float = 1.0, priority: int = 0, order: int = 0) -> float:
        """Return the cost of all items that would be served before a new request, if no more requests arrived."""
        mine: _TenantQueue[Item] = self._queues.get((priority, tenant)) or _TenantQueue(weight)
        place = mine.place(order)
        start = mine.start(place, self._now.get(priority, 0.0))
        return sum(entry.cost for entry in itertools.islice(mine.waiting, place)) + sum(
            entry.cost
            for (other, _), queue in self._queues.items()
            if queue is not mine
            for entry in queue.waiting
            if other < priority or (other == priority and entry.start <= start)
        )

    def push_out(self) -> Item:
        """Remove and return the last item of the largest backlog at the least urgent priority. An item must wait."""
        return self._push_out(lambda queue: (queue.backlog,))

    def _push_out(self, size: Callable[[_TenantQueue[Item]], tuple[float, ...]]) -> Item:
        key = max(self._waiting(), key=lambda key: (key[0], size(self._queues[key])))
        queue = self._queues[key]
        entry = queue.waiting.pop()
        queue.finish = entry.start
        self._removed(key)
        return entry.item

    def _waiting(self) -> list[tuple[int, str]]:
        return [key for key, queue in self._queues.items() if queue.waiting]

    def _removed(self, key: tuple[int, str]) -> None:
        self._length -= 1
        queue = self._queues[key]
        if not self._length:
            self._queues.clear()
            self._now.clear()
        # A tenant whose finish time is later than the virtual time must be kept. If it were forgotten, its next request
        # would start earlier than its share allows.
        elif not queue.waiting and queue.finish <= self._now.get(key[0], 0.0):
            del self._queues[key]
