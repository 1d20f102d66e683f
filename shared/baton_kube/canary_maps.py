"""The ConfigMaps that say where canaries stand. Each has one writer, so that no writer is in another's way."""

from typing import Annotated

import msgspec

Weight = Annotated[int, msgspec.Meta(ge=0, le=100)]

VALUES_KEY = "canary.json"
STATUS_KEY = "weights.json"
ANALYSIS_KEY = "analysis.json"
OVERRIDE_KEY = "weights"


def values_map(prefix: str) -> str:
    """Name of the one that the chart renders: what values say of each canary."""
    return f"{prefix}-values"


def status_map(prefix: str) -> str:
    """Name of the one that the controller makes: the weights of canaries that it judges, and its analysis."""
    return f"{prefix}-status"


def override_map(prefix: str) -> str:
    """Name of the one whose data only operators write: weights that come before all others."""
    return f"{prefix}-override"


class Moved(msgspec.Struct, frozen=True):
    """The weight that the controller gives the canary with these settings, in percent."""

    generation: str
    weight: Weight


class CanaryMapError(ValueError):
    """The data of such a ConfigMap cannot be used."""


def parse_status(text: str) -> dict[str, Moved]:
    """Read what the controller has decided, by model. Raises CanaryMapError."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Moved])
    except msgspec.MsgspecError as error:
        raise CanaryMapError(f"{STATUS_KEY}: {error}") from None


def parse_override(text: str) -> dict[str, int]:
    """Read YAML, one `model: weight` a line, weights in percent. Raises CanaryMapError."""
    try:
        return msgspec.convert(msgspec.yaml.decode(text) or {}, dict[str, Weight])
    except msgspec.MsgspecError as error:
        raise CanaryMapError(f"{OVERRIDE_KEY}: {error}") from None
