"""The configuration file: the canaries to judge and the Deployments to scale."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Replicas = Annotated[int, msgspec.Meta(ge=1)]
_Weight = Annotated[int, msgspec.Meta(ge=1, le=100)]


class CanarySpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, rename="camel"):
    """The steps of a canary's weight, and how much worse than stable it may be.

    steps: percent of the model's traffic. generation: any value; changing it restarts a canary that was rolled back.
    min_requests: how many each revision needs before a comparison. max_*_ratio: limit the ratio of the canary's p95 to
    stable's, and also its average slowdown over the quantiles. max_error_rate_increase: the limit of the difference
    between the shares of failed requests.
    """

    revision: _Name
    stable: _Name = "stable"
    generation: str | int = 0
    steps: Annotated[tuple[_Weight, ...], msgspec.Meta(min_length=1)] = (5, 25, 50, 100)
    interval_seconds: _Positive = 60.0
    min_requests: _Replicas = 300
    max_ttft_p95_ratio: _Positive = 1.2
    max_tpot_p95_ratio: _Positive = 1.2
    max_error_rate_increase: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01


class RoleSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The Deployment of a role's pods, and the range of its replicas."""

    deployment: _Name
    min: _Replicas = 1
    max: _Replicas


class ScalerSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, rename="camel"):
    """The latency objectives for nine requests in ten, and the Deployments to scale to meet them.

    mode: `scale` sets replicas, `metrics` only publishes the desired number. dryRun: only log the desired number.
    """

    prefill: RoleSpec
    decode: RoleSpec
    ttft_slo_seconds: _Positive = 2.0
    tpot_slo_seconds: _Positive = 0.05
    dry_run: bool = False
    mode: Literal["scale", "metrics"] = "scale"


class ModelSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The settings of one model. None: the controller does not manage its canary, or its scale."""

    canary: CanarySpec | None = None
    scaler: ScalerSpec | None = None


class ConfigFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The content of the file, YAML or JSON. models: by the names that clients use."""

    models: dict[_Name, ModelSpec] = {}


class ConfigFileError(ValueError):
    """The file cannot be used; the message says where and why."""


def read_config(path: Path) -> ConfigFile:
    """Return the content of the file. Raises ConfigFileError."""
    try:
        content = msgspec.convert(msgspec.yaml.decode(path.read_bytes()) or {}, ConfigFile)
    except OSError as error:
        raise ConfigFileError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigFileError(f"{path}: {error}") from None
    for name, model in content.models.items():
        if problem := _problem(model):
            raise ConfigFileError(f"{path}: model {name}: {problem}")
    return content


def _problem(model: ModelSpec) -> str | None:
    if canary := model.canary:
        if list(canary.steps) != sorted(set(canary.steps)):
            return f"canary.steps: {list(canary.steps)} do not rise"
        if canary.revision == canary.stable:
            return f"canary.revision: {canary.revision!r} is the stable one"
    if scaler := model.scaler:
        for name, role in (("prefill", scaler.prefill), ("decode", scaler.decode)):
            if role.min > role.max:
                return f"scaler.{name}: min {role.min} is more than max {role.max}"
        if scaler.prefill.deployment == scaler.decode.deployment:
            return f"scaler: {scaler.decode.deployment!r} cannot be both prefill and decode"
    return None
