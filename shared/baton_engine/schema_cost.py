"""Refuses JSON schemas whose compilation would take minutes or gigabytes, because no limit of the library covers it."""

import json
import math
import re
from decimal import Decimal
from typing import Any

from .schema_alternatives import MOST_COMBINED, Combinations

# The library visits each remainder of a division by `multipleOf`: this many take half a second and 25 MB.
_MOST_REMAINDERS = 100_000
# The library compares all patterns of names with each other: this many take 0.2 s, and a thousand take minutes.
_MOST_NAME_PATTERNS = 64
# Where Lark has a JSON schema. The library allows nothing but white space before the brace.
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_REFERRING = frozenset({"$ref", "anyOf", "oneOf"})
_NARROWING = _REFERRING | {"multipleOf", "properties", "items", "prefixItems", "additionalProperties"}
_LARGEST_EXPONENT = 40  # larger numbers have too many remainders in any case, and their powers of ten take long


class _Cost:
    """What one schema costs. It sees each object as pairs, so that no key hides another one that is the same."""

    def __init__(self) -> None:
        self.name_patterns = 0
        self.combined = 0  # alternatives
        self._divisors: set[Decimal] = set()
        self._combines = False  # whether a number may have to be a multiple of several divisors

    def see(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            if key == "multipleOf" and isinstance(value, float) and math.isfinite(value) and value > 0:
                self._divisors.add(Decimal(repr(value)).normalize())
            elif key == "patternProperties" and isinstance(value, dict):
                self.name_patterns += len(value)
        found = dict(pairs)
        narrowing = found.keys() & _NARROWING
        self._combines |= "allOf" in found or "patternProperties" in found
        self._combines |= len(narrowing) > 1 and not narrowing.isdisjoint(_REFERRING)
        return found

    @property
    def remainders(self) -> int:
        """The remainders of all divisors. A divisor with decimal places has as many as it has without its point."""
        if not self._divisors:
            return 0
        places = {divisor: max(-int(divisor.as_tuple().exponent), 0) for divisor in self._divisors}
        most = max(places.values())
        if self._combines:
            places = dict.fromkeys(places, most)
        if any(divisor.adjusted() + shift > _LARGEST_EXPONENT for divisor, shift in places.items()):
            return _MOST_REMAINDERS + 1
        whole = [int(divisor.scaleb(shift)) for divisor, shift in places.items()]
        return math.lcm(*whole) if self._combines else sum(whole)


def check_schema(schema: str) -> None:
    """Raise ValueError when a JSON schema is not JSON or costs too much to compile."""
    _check([_cost(schema.lstrip(), 0)])


def check_embedded_schemas(lark: str) -> None:
    """Raise ValueError when a JSON schema in a Lark grammar is not JSON, or all of them cost too much to compile."""
    _check([_cost(lark, match.end()) for match in _EMBEDDED.finditer(lark)])


def _cost(text: str, start: int) -> _Cost:
    cost = _Cost()
    try:
        schema, _ = json.JSONDecoder(object_pairs_hook=cost.see, parse_int=float).raw_decode(text, start)
        cost.combined = Combinations(schema).count
    except RecursionError:
        raise ValueError("a JSON schema in it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"a JSON schema in it is not JSON: {error}") from None
    return cost


def _check(costs: list[_Cost]) -> None:
    if sum(cost.combined for cost in costs) > MOST_COMBINED:
        raise ValueError(f"the parts that must match at once have more than {MOST_COMBINED} alternatives together")
    if sum(cost.name_patterns for cost in costs) > _MOST_NAME_PATTERNS:
        raise ValueError(f"it has more than {_MOST_NAME_PATTERNS} 'patternProperties'")
    if sum(cost.remainders for cost in costs) > _MOST_REMAINDERS:
        raise ValueError(f"the numbers in 'multipleOf' have more than {_MOST_REMAINDERS} remainders together")
