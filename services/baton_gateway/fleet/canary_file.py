"""Reads canaries from a file, for a gateway outside of Kubernetes."""

import asyncio
import logging
from pathlib import Path

from ..concurrency.background import keep_running
from ..routing.canary import CanaryError, parse_canaries
from .catalog import Catalog

log = logging.getLogger(__name__)

_POLL_S = 0.5


class CanaryFile:
    """Follows a file of canaries. While it cannot be read or parsed, the last canaries stay."""

    def __init__(self, path: Path, catalog: Catalog) -> None:
        """Raises CanaryError."""
        self._path = path
        self._catalog = catalog
        try:
            self._text = path.read_bytes()
            catalog.set_canaries(parse_canaries(self._text))
        except (OSError, CanaryError) as error:
            raise CanaryError(f"cannot use the canaries of {path}: {error}") from None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep_running("canaries", self._follow)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                text = self._path.read_bytes()
                if text == self._text:
                    continue
                self._text = text
                self._catalog.set_canaries(parse_canaries(text))
            except (OSError, CanaryError) as error:
                log.error(
                    "the new canaries are not used, the previous ones stay: %s",
                    error,
                    extra={"event": "canaries_refused"},
                )
            else:
                log.info("canaries read", extra={"event": "canaries_read", "canaries": text.decode()})
