"""Reads and writes the JSON in the texts of models and clients. What it writes is JSON for every reader, in UTF-8."""

import json
import math
import re
from typing import Any, NoReturn

# One escape. The group is half of a surrogate pair without the other half.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def read_json(text: str) -> Any:
    r"""Parse JSON. The escape of half a surrogate pair, as in "\ud83d", becomes U+FFFD, since UTF-8 cannot hold it.

    Raises ValueError for what is not JSON, NaN and infinite numbers included, and RecursionError for deep nesting.
    """
    if "\\u" in text:
        text = _ESCAPE.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], text)
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:20]} is too large")
    return number
