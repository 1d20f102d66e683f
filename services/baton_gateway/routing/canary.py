"""Canaries: the share of a model's requests that another revision gets, read from a ConfigMap or a file."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from baton_kube.canary_maps import ControllerWeight


class CanaryShare(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The share of a model's requests that one revision gets.

    weight: in percent of the sessions. shadow: the revision only gets copies of its share, and the answers to them are
    dropped.
    """

    revision: str
    weight: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0
    shadow: bool = False

    def takes(self, canary_draw: float) -> bool:
        """Whether the canary gets a request. canary_draw: as in Demand.

        A session that the canary serves stays with it while the weight grows.
        """
        return canary_draw * 100 < self.weight


class StatedCanary(CanaryShare, forbid_unknown_fields=True, frozen=True):
    """A canary as Helm values state it. generation: identifies these settings if the controller sets the weight."""

    generation: str = ""


class CanaryError(ValueError):
    """A file or ConfigMap of canaries cannot be parsed."""


def parse_canaries(text: str | bytes) -> dict[str, CanaryShare]:
    """Read a JSON object of canaries by the name of their model. Raises CanaryError."""
    try:
        return msgspec.json.decode(text, type=dict[str, CanaryShare])
    except msgspec.MsgspecError as error:
        raise CanaryError(str(error)) from None


def parse_stated(text: str) -> dict[str, StatedCanary]:
    """Read the canaries of Helm values, a JSON object by model name. Raises CanaryError."""
    try:
        return msgspec.json.decode(text, type=dict[str, StatedCanary])
    except msgspec.MsgspecError as error:
        raise CanaryError(str(error)) from None


def effective(
    stated: Mapping[str, StatedCanary], controller_weights: Mapping[str, ControllerWeight], overrides: Mapping[str, int]
) -> dict[str, CanaryShare]:
    """Return the canaries with their effective weights: an override, else the controller's weight, else the stated one.

    The controller's weight counts only if it was set for the same generation of settings.
    """
    canaries = {}
    for model, canary in stated.items():
        weight: float = canary.weight
        found = controller_weights.get(model)
        if canary.generation and found is not None and found.generation == canary.generation:
            weight = found.weight
        canaries[model] = CanaryShare(canary.revision, overrides.get(model, weight), canary.shadow)
    return canaries
