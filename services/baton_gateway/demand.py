"""What a request asks of pods, as far as it matters to where it goes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton_common.block_hash import block_keys


@dataclass(frozen=True, slots=True)
class Demand:
    """num_tokens: of the prompt, and what is generated of it already. most_tokens: with all that may be generated.

    keys: for a block size, the keys of the prompt's blocks as prefix caches have them. session: what the client says
    belongs together; empty = nothing.
    """

    num_tokens: int
    most_tokens: int = 0
    keys: Callable[[int], Iterable[int]] = lambda _block_size: ()
    session: str = ""

    @classmethod
    def of(cls, token_ids: Sequence[int], most_tokens: int, session: str = "") -> "Demand":
        """Return the demand of a prompt."""
        return cls(len(token_ids), most_tokens, lambda block_size: block_keys(token_ids, block_size), session)
