"""How far a gateway has come in its life."""

from dataclasses import dataclass


@dataclass(slots=True)
class Phase:
    """draining: it is not ready any more, but requests are still served. refusing: nothing new is taken."""

    draining: bool = False
    refusing: bool = False
