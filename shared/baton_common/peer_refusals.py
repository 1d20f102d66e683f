"""Counts and logs who was refused because nothing proved that it is a pod of this release."""

import logging
import time
from collections import Counter

log = logging.getLogger(__name__)

# Further refusals of the same minute are only counted, so that a flood of calls does not flood the logs.
_LINES_PER_MINUTE = 10


class PeerRefusals:
    """Refused calls and connections of one process."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(grpc=0, bulk=0)
        self._minute = time.monotonic()
        self._this_minute = 0

    def add(self, port: str, peer: str, reason: str) -> None:
        """port: grpc or bulk. peer: an address. reason: our own words or a library's, never what a stranger sent."""
        self.counts[port] += 1
        now = time.monotonic()
        if now - self._minute >= 60:
            self._report_unlogged()
            self._minute, self._this_minute = now, 0
        self._this_minute += 1
        if self._this_minute <= _LINES_PER_MINUTE:
            log.warning("refused %s: %s", peer, reason, extra={"event": f"{port}_refused"})

    def _report_unlogged(self) -> None:
        unlogged = self._this_minute - _LINES_PER_MINUTE
        if unlogged > 0:
            log.warning("%d more were refused and not logged", unlogged, extra={"event": "refusals_unlogged"})
