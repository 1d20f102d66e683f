"""Damage to KV pieces on their way from pod to pod."""

import asyncio
import random
from enum import StrEnum

# Header fields are a few dozen of the many thousand bytes of a piece: flips spread evenly would hardly ever meet them.
_HEADER_BYTES = 64


class Damage(StrEnum):
    """One piece's fate."""

    DROPPED = "dropped"
    DELAYED = "delayed"
    DUPLICATED = "duplicated"
    REORDERED = "reordered"
    CORRUPTED = "corrupted"


class Tampering:
    """Damages some of the pieces that pass. The same seed makes the same decisions."""

    def __init__(self, damage: Damage, rate: float, most_delay_s: float, seed: str) -> None:
        """rate: the part of the pieces that is hit."""
        self.damage = damage
        self.hits = 0
        self._rate = rate
        self._most_delay_s = most_delay_s
        self._rng = random.Random(seed)

    def hits_next(self) -> bool:
        """Decide about one piece."""
        hit = self._rng.random() < self._rate
        self.hits += hit
        return hit

    async def apply(self, message: bytes) -> list[bytes]:
        """Return what becomes of a piece that is hit; to be reordered takes another one, and is not done here."""
        match self.damage:
            case Damage.DROPPED:
                return []
            case Damage.DUPLICATED:
                return [message, message]
            case Damage.CORRUPTED:
                return [self._corrupted(message)]
            case Damage.DELAYED:
                await asyncio.sleep(self._rng.uniform(0, self._most_delay_s))
        return [message]

    def _corrupted(self, message: bytes) -> bytes:
        """Return the message with one bit flipped."""
        end = self._rng.choice([len(message), min(len(message), _HEADER_BYTES)])
        bit = self._rng.randrange(end * 8)
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)
