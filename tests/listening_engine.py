"""Replaces a pod's engine process, and only records the commands that it gets."""

import asyncio
from collections.abc import Callable
from typing import Any

from baton_common.kv_layout import KvLayout, Plane
from baton_worker.messages import Ready


class ListeningEngine:
    def __init__(self) -> None:
        self.ready = Ready("f", 1024, 512, 16, 64, KvLayout(1, (Plane("key", 1, 16, "float32"),)), 1 << 16, 4)
        self.heard: list[Any] = []
        self.send = self.heard.append

    async def drained(self) -> None:
        pass

    async def until(self, condition: Callable[[Any], bool]) -> None:
        async with asyncio.timeout(10):
            while not (self.heard and condition(self.heard[-1])):
                await asyncio.sleep(0.01)
