"""Which modules the lists of quantization configurations name."""

import re
from collections.abc import Iterable

from baton_engine.config import ConfigError

_LONGEST = 1000
# A name ends here, or continues with the name of a submodule.
_BOUNDARY = r"(?:\.|$)"


def check_pattern(text: str) -> re.Pattern[str]:
    """As compile_pattern, and raise ConfigError for a huge text."""
    if len(text) > _LONGEST:
        raise ConfigError(f"a pattern in quantization_config has {len(text)} characters; at most {_LONGEST} are read")
    return compile_pattern(text)


def compile_pattern(text: str) -> re.Pattern[str]:
    """Raises ConfigError for a text that is no regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"quantization_config has {text!r}, which is not a regular expression: {error}") from None


class ExactOrPattern:
    """Names and, after "re:", regular expressions for the beginnings of names: the lists of compressed-tensors."""

    def __init__(self, entries: Iterable[str]) -> None:
        entries = list(entries)
        self.exact = frozenset(entry for entry in entries if not entry.startswith("re:"))
        self._patterns = [check_pattern(entry[3:]) for entry in entries if entry.startswith("re:")]

    def has(self, name: str) -> bool:
        return name in self.exact or self.matches(name)

    def matches(self, name: str) -> bool:
        """Whether a regular expression matches the name."""
        return any(pattern.match(name) for pattern in self._patterns)


class NotConverted:
    """Modules that are not quantized, as the lists of transformers name them: by the beginning of a name or a regular
    expression for it, either up to a boundary of modules, or by the end of a name."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._ends = tuple(entries)
        for entry in self._ends:
            check_pattern(entry)
        # One expression, as models with experts have tens of thousands of modules.
        self._pattern = compile_pattern("|".join(f"(?:{entry}){_BOUNDARY}" for entry in self._ends) or "(?!)")

    def has(self, name: str) -> bool:
        return name.endswith(self._ends) or self._pattern.match(name) is not None
