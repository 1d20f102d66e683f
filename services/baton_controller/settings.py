"""Settings of the controller: environment variables `BATON_…`, or flags of `baton controller`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class ControllerSettings(BaseSettings):
    """Takes the canaries of a release through their steps, and scales its prefill and decode Deployments."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        extra="ignore",
    )

    namespace: str = ""
    """Namespace of the release. Empty: the controller's own."""
    release: str = Field(min_length=1)
    """Name of the Helm release. Its gateways are the pods with this name in the label app.kubernetes.io/instance."""
    config_file: Path
    """YAML or JSON file with each model's canary and scaler. It is read again when it changes."""
    canary_configmaps: str = ""
    """Prefix of the names of the canaries' ConfigMaps. The controller makes PREFIX-status, which holds the weights for
    gateways and the state of the analysis, and reads PREFIX-override. Empty: the release's name and `-canary`."""
    owner: str = ""
    """Deployment that owns PREFIX-status, so that Kubernetes deletes both together. Empty: none."""
    interval_s: float = Field(default=15, gt=0)
    """Seconds between two reconciliations."""
    admin_host: str = "0.0.0.0"
    """Address of the admin port."""
    admin_port: int = Field(default=9401, ge=0, le=65535)
    """Port for operators: /metrics and the probes /live and /ready. 0: any free port."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""

    @model_validator(mode="after")
    def _named(self) -> "ControllerSettings":
        self.canary_configmaps = self.canary_configmaps or f"{self.release}-canary"
        return self
