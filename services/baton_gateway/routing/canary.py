"""Canaries: the share of a model's requests that another revision gets, read from a ConfigMap or a file."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from baton_kube.canary_maps import Moved


class CanaryShare(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A revision on trial. weight: percent of the sessions that it gets, or of the requests that it gets copies of.

    shadow: it only gets copies of requests, and the answers to them are dropped.
    """

    revision: str
    weight: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0
    shadow: bool = False

    def takes(self, canary_draw: float) -> bool:
        """Whether the canary gets a request with this draw, which is as in Demand.

        A session that the canary has got once stays with it while the weight grows.
        """
        return canary_draw * 100 < self.weight


class Stated(CanaryShare, forbid_unknown_fields=True, frozen=True):
    """A canary as Helm values say it. generation: names its settings where the controller gives the weight."""

    generation: str = ""


class CanaryError(ValueError):
    """A file or ConfigMap of canaries cannot be parsed."""


def parse_canaries(text: str | bytes) -> dict[str, CanaryShare]:
    """Read a JSON object of canaries by the name of their model. Raises CanaryError."""
    try:
        return msgspec.json.decode(text, type=dict[str, CanaryShare])
    except msgspec.MsgspecError as error:
        raise CanaryError(str(error)) from None


def parse_stated(text: str) -> dict[str, Stated]:
    """Read the canaries of Helm values, a JSON object by model name. Raises CanaryError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Stated])
    except msgspec.MsgspecError as error:
        raise CanaryError(str(error)) from None


def effective(
    stated: Mapping[str, Stated], moved: Mapping[str, Moved], overrides: Mapping[str, int]
) -> dict[str, CanaryShare]:
    """Return the canaries with the weights that hold: an override, else the controller's, else the stated one.

    The controller's weight counts only for the generation of settings that it saw; else the stated weight is used.
    """
    canaries = {}
    for model, canary in stated.items():
        weight: float = canary.weight
        found = moved.get(model)
        if canary.generation and found is not None and found.generation == canary.generation:
            weight = found.weight
        canaries[model] = CanaryShare(canary.revision, overrides.get(model, weight), canary.shadow)
    return canaries
