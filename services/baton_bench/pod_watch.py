"""The state of Baton's pods during a measurement."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton_bench.endpoint import Endpoint

_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class PodSample:
    """All pods together. at: seconds since the load began. kv: share of the blocks that are held, by role."""

    at: float
    queued_tokens: int
    requests: int
    kv: dict[str, float]


class PodWatch:
    """Polls the admin port of a gateway once a second."""

    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint.parse(url)

    async def follow(self, began: float, samples: list[PodSample]) -> None:
        """Add samples until cancelled. A port that does not answer leaves a gap."""
        for number in range(1_000_000_000):
            await asyncio.sleep(max(began + number * _INTERVAL_S - time.perf_counter(), 0))
            try:
                pods = (await self._endpoint.get("/pods"))["pods"]
                samples.append(sample(time.perf_counter() - began, pods))
            except (OSError, ValueError, KeyError, TypeError):
                continue

    async def check(self) -> None:
        """Raises OSError or ValueError when the admin port does not answer correctly."""
        await self._endpoint.get("/pods")


def sample(at: float, pods: Sequence[dict[str, Any]]) -> PodSample:
    """Combine the figures that the admin port reports for each pod."""
    roles = sorted({pod["role"] for pod in pods})
    kv = {}
    for role in roles:
        held, blocks = (sum(pod[name] for pod in pods if pod["role"] == role) for name in ("blocks_held", "blocks"))
        kv[role] = held / blocks if blocks else 0.0
    decodes = [pod for pod in pods if pod["role"] == "decode"]
    return PodSample(at, sum(pod["queued_prefill_tokens"] for pod in pods), sum(pod["requests"] for pod in decodes), kv)
