"""What the supervisor has to know about one child process."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton_cli.ports import Address


@dataclass(frozen=True)
class ChildSpec:
    """One child: its command line is data, so that anything can be supervised.

    env: added to the supervisor's environment. ready_at: where GET /ready tells that the child is ready; without it
    the child says so itself with a log line that holds `"event": "ready"`. grace_s: seconds from SIGTERM to SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_at: Address | None = None
    grace_s: float = 5.0
