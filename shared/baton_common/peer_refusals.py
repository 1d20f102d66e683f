"""Counts and logs the calls, connections and messages that the ports of a pod refuse."""

import logging
import time
from collections import Counter

log = logging.getLogger(__name__)

# Further refusals within the same minute are only counted, so that a flood of calls does not flood the logs.
_LINES_PER_MINUTE = 10

# The reasons to refuse a message, and whether only a broken or hostile peer sends such a message. A correct gateway
# may forward a client's invalid request, and versions differ during a rollout, so False does not blame the peer.
MESSAGE_REASONS = {
    "unreadable": True,  # the bytes are not a protobuf message of the expected type
    "field": True,  # a field that no client sets is out of its range
    "repeated": True,  # the id is already in use on this connection
    "unread": True,  # the peer sends, but does not read the answers
    "kind": False,  # the message is empty, or of a kind that this pod's version does not know
    "request": False,  # no engine with these limits can run the request
    "address": False,  # this pod may not link to a pod at that address
    "capacity": False,  # the connection already holds its maximum of open requests or tickets
}


class MessageRefused(Exception):
    """This process refuses to act on a message.

    reason: one of MESSAGE_REASONS. field: the field at fault. problem: our own text, which never quotes the peer.
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
    """The refusals of one process: calls and connections by port in `counts`, messages by reason in `messages`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(grpc=0, bulk=0)
        self.messages: Counter[str] = Counter(dict.fromkeys(MESSAGE_REASONS, 0))
        self._minute = time.monotonic()
        self._this_minute = 0

    def add(self, port: str, peer: str, reason: str) -> None:
        """port: grpc or bulk. peer: an address. reason: our own text or a library's, never bytes that the peer sent."""
        self.counts[port] += 1
        self._log(logging.WARNING, peer, reason, f"{port}_refused")

    def add_message(self, peer: str, refusal: MessageRefused) -> None:
        """peer: an address."""
        self.messages[refusal.reason] += 1
        # Clients can cause refusals at any rate by sending bad requests, so those are no warning for an operator.
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
            log.warning("%d more refusals were not logged", unlogged, extra={"event": "refusals_unlogged"})
