"""The fields of a quantization configuration, checked as those of config.json are."""

from typing import Any

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile


def quantization_of(config: dict[str, Any]) -> Any:
    """Return what a config.json says of quantized weights, maybe in the part for text; None if nothing.

    config: its fields.
    """
    text = config.get("text_config")
    parts = [config, *([text] if isinstance(text, dict) else [])]
    found = (part.get(name) for part in parts for name in ("quantization_config", "compression_config"))
    return next(filter(None, found), None)


class QuantizationFields(ConfigFile):
    """The object quantization_config of a config.json, or a file that older tools write beside it."""

    def names(self, field: str) -> list[str]:
        """Return a list of strings, empty when the field is absent."""
        value = self.fields.get(field) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{field} in the quantization config is not a list of names")
        return value

    def mapping(self, field: str) -> dict[str, Any]:
        """Return an object, empty when the field is absent."""
        value = self.fields.get(field) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{field} in the quantization config is not a JSON object")
        return value

    def refuse(self, what: str, instead: str) -> ConfigError:
        """Return the error for something that is not served. instead: what is."""
        return ConfigError(f"the weights are quantized with {what}, which is not served; {instead}")
