"""What a request asks of pods, as far as it matters to where it goes."""

import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton_common.block_hash import block_keys
from baton_common.cache_scope import UNSALTED, CacheScope

_SALT = 0x5EED  # so that the lot says nothing of the pod that the session is kept on


@dataclass(frozen=True, slots=True)
class Demand:
    """num_tokens: of the prompt, and what is generated of it already. most_tokens: with all that may be generated.

    keys: for a block size, the keys of the prompt's blocks as prefix caches have them. session: what the client says
    belongs together; empty = nothing. lot: by which canaries get their share, from 0 up to but not including 1; a
    session always draws the same.
    """

    num_tokens: int
    most_tokens: int = 0
    keys: Callable[[int], Iterable[int]] = lambda _block_size: ()
    session: str = ""
    lot: float = 0.0

    @classmethod
    def of(
        cls, token_ids: Sequence[int], most_tokens: int, session: str = "", scope: CacheScope = UNSALTED
    ) -> "Demand":
        """Return the demand of a prompt. scope: what of prefix caches the request can find."""
        lot = zlib.crc32(session.encode(errors="replace"), _SALT) / 2**32 if session else random.random()
        ids = array("I", token_ids)  # of which copies are made much faster than of a list
        return cls(len(ids), most_tokens, lambda block_size: block_keys(ids, block_size, scope), session, lot)
