"""Counts and logs what the ports of a pod refuse: strangers, and messages of peers that must not be acted on."""

import logging
import time
from collections import Counter

log = logging.getLogger(__name__)

# Further refusals of the same minute are only counted, so that a flood of calls does not flood the logs.
_LINES_PER_MINUTE = 10

# Why a message is refused, and whether only a broken or hostile peer sends it. A client's odd request reaches a worker
# through a correct gateway, and versions differ during a rollout, so those refusals say nothing against the peer.
MESSAGE_REASONS = {
    "unreadable": True,  # no protobuf message of the expected type
    "field": True,  # a field that no client decides is out of its range
    "repeated": True,  # an id that is in use on this connection
    "unread": True,  # the peer sends, but does not read the answers
    "kind": False,  # of a version that this pod does not know, or empty
    "request": False,  # no engine of these limits can run it
    "address": False,  # of no pod that this one may link to
    "capacity": False,  # the connection holds as much as one may
}


class MessageRefused(Exception):
    """A message that must not be acted on.

    reason: one of MESSAGE_REASONS. field: the one at fault. problem: our own words, never what the peer sent.
    """

    def __init__(self, reason: str, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.reason = reason
        self.field = field
        self.problem = problem

    @property
    def is_violation(self) -> bool:
        return MESSAGE_REASONS[self.reason]


class PeerRefusals:
    """Refused calls, connections (`counts`, by port) and messages (`messages`, by reason) of one process."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(grpc=0, bulk=0)
        self.messages: Counter[str] = Counter(dict.fromkeys(MESSAGE_REASONS, 0))
        self._minute = time.monotonic()
        self._this_minute = 0

    def add(self, port: str, peer: str, reason: str) -> None:
        """port: grpc or bulk. peer: an address. reason: our own words or a library's, never what a stranger sent."""
        self.counts[port] += 1
        self._log(logging.WARNING, peer, reason, f"{port}_refused")

    def add_message(self, peer: str, refusal: MessageRefused) -> None:
        """peer: an address."""
        self.messages[refusal.reason] += 1
        # A client can have its requests refused as often as it likes; that is no news to an operator.
        level = logging.WARNING if refusal.is_violation else logging.DEBUG
        if log.isEnabledFor(level):
            self._log(level, peer, f"a message, {refusal}", "message_refused")

    def _log(self, level: int, peer: str, reason: str, event: str) -> None:
        now = time.monotonic()
        if now - self._minute >= 60:
            self._report_unlogged()
            self._minute, self._this_minute = now, 0
        self._this_minute += 1
        if self._this_minute <= _LINES_PER_MINUTE:
            log.log(level, "refused %s: %s", peer, reason, extra={"event": event})

    def _report_unlogged(self) -> None:
        unlogged = self._this_minute - _LINES_PER_MINUTE
        if unlogged > 0:
            log.warning("%d more were refused and not logged", unlogged, extra={"event": "refusals_unlogged"})
