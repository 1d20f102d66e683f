"""Describes a request as far as routing needs: its size, its prefix keys and its session."""

import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton_common.block_hash import block_keys
from baton_common.cache_scope import UNSALTED, CacheScope

_SALT = 0x5EED  # makes the canary draw independent of the pod to which the session hashes


@dataclass(frozen=True, slots=True)
class Demand:
    """num_tokens: of the prompt and the output so far. max_total_tokens: of the prompt and the longest possible output.

    keys: returns the prefix-cache keys of the prompt's blocks for a block size. session: the client's name for requests
    that belong together; empty = none. canary_draw: decides whether a canary gets the request. It is a number from 0 up
    to but not including 1, always the same for a session and random without one.
    """

    num_tokens: int
    max_total_tokens: int = 0
    keys: Callable[[int], Iterable[int]] = lambda _block_size: ()
    session: str = ""
    canary_draw: float = 0.0

    @classmethod
    def of(
        cls, token_ids: Sequence[int], max_total_tokens: int, session: str = "", scope: CacheScope = UNSALTED
    ) -> "Demand":
        """Return the demand of a prompt. scope: the part of prefix caches in which the request may find blocks."""
        canary_draw = zlib.crc32(session.encode(errors="replace"), _SALT) / 2**32 if session else random.random()
        ids = array("I", token_ids)  # an array is copied much faster than a list
        return cls(
            len(ids), max_total_tokens, lambda block_size: block_keys(ids, block_size, scope), session, canary_draw
        )
