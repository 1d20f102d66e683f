"""Tenants of a gateway under test, each with a key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton_gateway.tenancy.keys import make_key


def write_tenants(file: Path, tenants: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Write a tenants file with one key for each tenant, and return the headers that carry it, by tenant."""
    made = {name: make_key(name) for name in tenants}
    file.write_bytes(msgspec.json.encode({"tenants": tenants, "keys": [key for _, key in made.values()]}))
    return {name: {"authorization": f"Bearer {text}"} for name, (text, _) in made.items()}
