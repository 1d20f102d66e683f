"""Which share of a model's requests another revision gets, as a ConfigMap or a file says it."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from baton_kube.canary_maps import Moved


class CanaryShare(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
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


class Stated(CanaryShare, forbid_unknown_fields=True, frozen=True):
    """A canary as Helm values say it. generation: names its settings where the controller gives the weight."""

    generation: str = ""


class CanaryError(ValueError):
    """What is said of canaries makes no sense."""


def parse_canaries(text: str | bytes) -> dict[str, CanaryShare]:
    """Read a JSON object of canaries by the name of their model. Raises CanaryError."""
    try:
        return msgspec.json.decode(text, type=dict[str, CanaryShare])
    except msgspec.MsgspecError as error:
        raise CanaryError(str(error)) from None


def parse_stated(text: str) -> dict[str, Stated]:
    """Read what Helm values say, a JSON object by the name of the model. Raises CanaryError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Stated])
    except msgspec.MsgspecError as error:
        raise CanaryError(str(error)) from None


def effective(
    stated: Mapping[str, Stated], moved: Mapping[str, Moved], overrides: Mapping[str, int]
) -> dict[str, CanaryShare]:
    """Return the canaries with the weights that hold: an override, else the controller's, else the stated one.

    The controller's is for the settings that it has seen. A canary with other settings has the stated weight.
    """
    canaries = {}
    for model, canary in stated.items():
        weight: float = canary.weight
        found = moved.get(model)
        if canary.generation and found is not None and found.generation == canary.generation:
            weight = found.weight
        canaries[model] = CanaryShare(canary.revision, overrides.get(model, weight), canary.shadow)
    return canaries
