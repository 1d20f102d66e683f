"""Where the KV of a prompt can come from, if this engine need not compute it."""

from collections.abc import Callable
from typing import Protocol

from .delta import Reservation
from .sequence import Sequence


class KvSource(Protocol):
    """Brings KV into blocks that the engine has reserved: from prefill pods, from host memory, from another decode pod.

    The source answers an order by calling Engine.import_kv for each part, at once or later, in any order of the parts.
    A source that cannot bring all of it calls Engine.cancel_import, and the engine computes the KV.

    brings_first_tokens: whether the source also brings the first new token of each choice, by Engine.import_tokens. If
    not, the engine computes at least the prompt's last token, whose logits choose these tokens.
    """

    brings_first_tokens: bool

    def reach(self, sequence: Sequence, cached: Callable[[], int]) -> int:
        """Return the token up to which this source can bring the KV of a sequence, excluding that token; 0 = none.

        cached: returns how many of the first tokens the prefix cache has, which takes time. These are not ordered, so a
        source that has no KV after them returns 0.
        """
        ...

    def order(self, sequence: Sequence, reservation: Reservation) -> None:
        """Begin to bring the reserved KV. An order for the same request replaces the one before it."""
        ...

    def cancel(self, id: int) -> None:
        """Forget the order for a request. KV that still arrives for it is refused by the engine."""
        ...
