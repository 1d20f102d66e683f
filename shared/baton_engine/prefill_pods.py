"""Prefill pods as a source of KV."""

from collections.abc import Callable

from .delta import Reservation
from .sequence import Sequence


class PrefillPods:
    """Orders the KV and the first tokens of the requests that the gateway has assigned to prefill pods.

    The process that talks to the pods takes the orders with `take`.
    """

    brings_first_tokens = True

    def __init__(self) -> None:
        self._orders: dict[int, Reservation] = {}

    def reach(self, sequence: Sequence, cached: Callable[[], int]) -> int:
        return sequence.given_len if sequence.request.imports_kv else 0

    def order(self, sequence: Sequence, reservation: Reservation) -> None:
        self._orders[reservation.id] = reservation

    def cancel(self, id: int) -> None:
        self._orders.pop(id, None)

    def take(self) -> list[Reservation]:
        """Return the orders that have been placed since the last call."""
        orders, self._orders = list(self._orders.values()), {}
        return orders
