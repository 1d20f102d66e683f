"""Settings of the controller: environment variables `BATON_…`, or flags of `baton controller`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class ControllerSettings(BaseSettings):
    """Takes the canaries of a release through their steps, and sizes its prefill and decode Deployments."""

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
    """Name of the Helm release: its gateways are the pods labelled app.kubernetes.io/instance with it."""
    config_file: Path
    """YAML or JSON file with each model's canary and scaler; read again when it changes."""
    canary_configmaps: str = ""
    """What the names of the canaries' ConfigMaps begin with: the controller makes PREFIX-status, which gateways follow
    and which keeps the analysis, and reads PREFIX-override. Empty: the release's name and `-canary`."""
    owner: str = ""
    """Deployment that owns the ConfigMap that the controller makes, so that it is removed with it. Empty: none."""
    interval_s: float = Field(default=15, gt=0)
    """Seconds between two looks at the gateways."""
    admin_host: str = "0.0.0.0"
    """Address of the admin port."""
    admin_port: int = Field(default=9401, ge=0, le=65535)
    """Port for operators: /metrics and the probes /live and /ready. 0: any free one."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""

    @model_validator(mode="after")
    def _named(self) -> "ControllerSettings":
        self.canary_configmaps = self.canary_configmaps or f"{self.release}-canary"
        return self
