"""How long to wait before a failed child is started again."""


class Backoff:
    """Exponential backoff from `first_s`, doubling up to `limit_s`. It is reset after a child was ready for
    `healthy_s`."""

    def __init__(self, first_s: float = 0.5, limit_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def after_failure(self, health_s: float) -> float:
        """Return the seconds to wait. health_s: how long the child had been ready when it failed."""
        if health_s >= self._healthy_s:
            self._next_s = self._first_s
        wait_s = self._next_s
        self._next_s = min(self._limit_s, 2 * wait_s)
        return wait_s
