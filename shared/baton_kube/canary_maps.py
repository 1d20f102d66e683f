"""The ConfigMaps with the settings and weights of canaries. Each has one writer, so writers never conflict."""

from typing import Annotated

import msgspec

Weight = Annotated[int, msgspec.Meta(ge=0, le=100)]

VALUES_KEY = "canary.json"
STATUS_KEY = "weights.json"
ANALYSIS_KEY = "analysis.json"
OVERRIDE_KEY = "weights"


def values_map(prefix: str) -> str:
    """Return the name of the ConfigMap that the chart renders: each canary's settings from the Helm values."""
    return f"{prefix}-values"


def status_map(prefix: str) -> str:
    """Return the name of the ConfigMap that the controller makes: its analysis, and the weights that it decided."""
    return f"{prefix}-status"


def override_map(prefix: str) -> str:
    """Return the name of the ConfigMap whose data only operators write: weights that override all others."""
    return f"{prefix}-override"


class ControllerWeight(msgspec.Struct, frozen=True):
    """The controller's weight for a canary, in percent. It is valid only for settings with this generation."""

    generation: str
    weight: Weight


class CanaryMapError(ValueError):
    """The data of one of these ConfigMaps cannot be used."""


def parse_status(text: str) -> dict[str, ControllerWeight]:
    """Return the controller's weights, by model. Raises CanaryMapError."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, ControllerWeight])
    except msgspec.MsgspecError as error:
        raise CanaryMapError(f"{STATUS_KEY}: {error}") from None


def parse_override(text: str) -> dict[str, int]:
    """Return the operators' weights in percent by model. text: YAML, `model: weight` a line. Raises CanaryMapError."""
    try:
        return msgspec.convert(msgspec.yaml.decode(text) or {}, dict[str, Weight])
    except msgspec.MsgspecError as error:
        raise CanaryMapError(f"{OVERRIDE_KEY}: {error}") from None
