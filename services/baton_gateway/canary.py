"""Which share of a model's requests another revision gets, as a ConfigMap or a file says it."""

from typing import Annotated

import msgspec


class Canary(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A revision on trial. weight: percent of the sessions that it gets, or of the requests that it gets copies of.

    shadow: it gets copies, whose answers are dropped, and nothing else.
    """

    revision: str
    weight: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0
    shadow: bool = False

    def takes(self, lot: float) -> bool:
        """Whether it is the one for a session with this lot, a number from 0 up to but not including 1.

        A session that it has once taken stays with it while the weight grows.
        """
        return lot * 100 < self.weight


class CanaryError(ValueError):
    """What is said of canaries makes no sense."""


def parse_canaries(text: str | bytes) -> dict[str, Canary]:
    """Read a JSON object of canaries by the name of their model. Raises CanaryError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Canary])
    except msgspec.MsgspecError as error:
        raise CanaryError(str(error)) from None
