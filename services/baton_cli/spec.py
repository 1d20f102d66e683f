"""The description of one child process for the supervisor."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton_cli.ports import Address


@dataclass(frozen=True)
class ChildSpec:
    """One child process.

    env: added to the supervisor's environment. ready_at: address where GET /ready answers 200 once the child is ready.
    None: the child logs a line with `"event": "ready"` instead. grace_s: seconds from SIGTERM to SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_at: Address | None = None
    grace_s: float = 5.0
