"""The fields of a quantization configuration, checked as those of config.json are."""

from collections.abc import Iterator
from typing import Any

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile


def quantization_of(config: dict[str, Any]) -> Any:
    """Return the quantization config of a config.json, which may be in the text part; None if there is none.

    config: its fields.
    """
    names = ("quantization_config", "compression_config")
    found = (part.get(name) for part in _parts(config) for name in names)
    return next(filter(None, found), None)


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of a model, and those of its parts for text."""
    yield config
    for name in ("text_config", "llm_config", "thinker_config"):
        if isinstance(part := config.get(name), dict):
            yield from _parts(part)


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
        """Return the error for a value that is not served. instead: the values that are."""
        return ConfigError(f"the weights are quantized with {what}, which is not served; {instead}")
