"""A model folder's config.json, whose fields are read by name and checked."""

import json
from pathlib import Path
from typing import Any

from .config import ConfigError

_DTYPES = ("float32", "bfloat16", "float16")


class ConfigFile:
    """The fields of a config.json. Each method raises ConfigError, which names the field, for an invalid value.

    A field that is null counts as absent, as in the configuration classes of transformers.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    @classmethod
    def read(cls, folder: Path) -> "ConfigFile":
        path = folder / "config.json"
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{folder} is not a model folder: it has no config.json") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return cls(fields)

    def with_defaults(self, defaults: dict[str, Any]) -> "ConfigFile":
        """Return these fields, and the default of each field that is absent."""
        present = {name: value for name, value in self.fields.items() if value is not None}
        return ConfigFile({**defaults, **present})

    @property
    def architecture(self) -> str:
        names = self.fields.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else "(none)"

    @property
    def dtype(self) -> str:
        """The dtype of the checkpoint; float32 when config.json names none."""
        name: str = self.fields.get("dtype") or self.fields.get("torch_dtype") or "float32"
        self._check("dtype", name, name in _DTYPES, f"one of {', '.join(_DTYPES)}")
        return name

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        given = self.fields.get("eos_token_id")
        ids = [] if given is None else given if isinstance(given, list) else [given]
        self._check("eos_token_id", given, all(_is_integer(id) for id in ids), "a token id or a list of them")
        return tuple(ids)

    def count(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1. Without a default the field is required."""
        value: int = self._present(name, default)
        self._check(name, value, _is_integer(value) and value >= 1, "an integer of at least 1")
        return value

    def at_most(self, name: str, most: int, default: int) -> int:
        """Return an integer from 1 to `most`."""
        value = self.count(name, default)
        self._check(name, value, value <= most, f"at most {most}")
        return value

    def integers(self, name: str) -> list[int]:
        """Return a list of integers of at least 0, empty when the field is absent."""
        value: list[int] = self.fields.get(name) or []
        valid = isinstance(value, list) and all(_is_integer(each) and each >= 0 for each in value)
        self._check(name, value, valid, "a list of integers of at least 0")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 0. Without a default the field is required."""
        value: int = self._present(name, default)
        self._check(name, value, _is_integer(value) and value >= 0, "an integer of at least 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number. Without a default the field is required."""
        value = self._present(name, default)
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        self._check(name, value, valid, "a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value: bool = self._present(name, default)
        self._check(name, value, isinstance(value, bool), "true or false")
        return value

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value: str = self._present(name, default)
        self._check(name, value, value in choices, f"one of {', '.join(choices)}")
        return value

    def require_absent(self, name: str, *values: object) -> None:
        """Raise ConfigError unless a field is absent or has one of these values, which change nothing."""
        value = self.fields.get(name)
        if value is not None and value not in values:
            raise ConfigError(f"{name} {value!r} in config.json is not served for {self.architecture}")

    def part(self, name: str) -> "ConfigFile":
        """Return the fields of an object in this one, which may be absent."""
        value: dict[str, Any] = self._present(name, {})
        self._check(name, value, isinstance(value, dict), "an object")
        return ConfigFile({**value, "architectures": self.fields.get("architectures")})

    def layer_types(
        self, name: str, layers: int, kinds: tuple[str, ...] = ("full_attention", "sliding_attention")
    ) -> list[str] | None:
        """Return the kind of attention of each layer, one of kinds; None when the field is absent."""
        value: list[str] | None = self.fields.get(name)
        valid = value is None or (isinstance(value, list) and len(value) == layers and all(k in kinds for k in value))
        self._check(name, value, valid, f"a list of {' or '.join(kinds)}, one for each of {layers} layers")
        return value

    def _present(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"config.json has no {name!r}")
        return default

    def _check(self, name: str, value: object, valid: bool, expected: str) -> None:
        if not valid:
            raise ConfigError(f"{name} in config.json is {value!r}; it must be {expected}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
