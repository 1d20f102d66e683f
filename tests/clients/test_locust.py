"""locust against a Baton that serves the demo model."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import Stack

from .conftest import LOOP

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "online" / "locustfile.py"

pytestmark = pytest.mark.asyncio(loop_scope=LOOP)


async def test_users_are_served(demo: Stack) -> None:
    """In a process of its own, as locust replaces parts of the standard library when it is imported."""
    files = f"{LOCUSTFILE},{Path(__file__).with_name('mistaken_user.py')}"
    command = [sys.executable, "-m", "locust", "--locustfile", files]
    command += ["--headless", "--host", demo.url, "--users", "4", "--spawn-rate", "4", "--run-time", "3s"]
    command += ["--stop-timeout", "10", "--only-summary", "--json"]
    locust = await asyncio.create_subprocess_exec(
        *command,
        env={
            **os.environ,
            "BATON_MODEL": demo.model,
            "BATON_API_KEY": demo.api_key or "",
            "BATON_OUTPUT_TOKENS": "8",
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, log = await locust.communicate()
    assert locust.returncode == 0, log.decode()
    rows = {row["name"]: row for row in json.loads(output)}
    assert rows.keys() == {"whole", "streamed", "first token", "wrong"}
    assert all(row["num_requests"] > 0 and row["num_failures"] == 0 for row in rows.values()), rows
    await demo.idle()
