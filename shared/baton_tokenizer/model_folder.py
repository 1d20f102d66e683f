"""The files of a model folder that say something about its tokenizer."""

from pathlib import Path
from typing import Any

import msgspec

from .errors import TokenizerError

# The largest published tokenizer.json has 33 MB.
_MOST_BYTES = 256 << 20


class ModelFolder:
    """Reads files of a model folder, each only once, so that a tokenizer is made of the same bytes as its hash.

    Each method raises TokenizerError, which names the file, when it is unusable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[str, bytes | None] = {}

    def names(self, pattern: str) -> list[str]:
        """Return the names of the files that match a pattern, sorted."""
        return sorted(path.name for path in self.path.glob(pattern) if path.is_file())

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None if the folder has no such file."""
        if name not in self._read:
            self._read[name] = self._load(name)
        return self._read[name]

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of a JSON file, {} if the folder has no such file."""
        data = self.read(name)
        if data is None:
            return {}
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (ValueError, RecursionError):
            raise TokenizerError(f"{self.path / name} does not hold a JSON object") from None

    def settings(self) -> dict[str, Any]:
        """Return the fields of tokenizer_config.json."""
        return self.fields("tokenizer_config.json")

    def model_type(self) -> str:
        """Return the model_type of config.json, "" if it names none."""
        found = self.fields("config.json").get("model_type")
        return found if isinstance(found, str) else ""

    def tokenizer_class(self) -> str:
        """Return the class that tokenizer_config.json names, without the "Fast" at its end; "" if it names none."""
        found = self.settings().get("tokenizer_class")
        return found.removesuffix("Fast") if isinstance(found, str) else ""

    def flag(self, name: str, default: bool) -> bool:
        """Return a flag of tokenizer_config.json, the default when it is absent or null."""
        value = self.settings().get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TokenizerError(f"{name} in {self.path / 'tokenizer_config.json'} must be true or false")
        return value

    def _load(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            if not path.is_file():
                return None
            if path.stat().st_size > _MOST_BYTES:
                raise TokenizerError(f"{path} is larger than {_MOST_BYTES >> 20} MiB")
            return path.read_bytes()
        except OSError as error:
            raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None
