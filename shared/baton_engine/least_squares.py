"""A least-squares fit that follows a changing relation between a few quantities and a positive result."""

import numpy as np

_MEMORY = 64  # samples after which one counts e times less
_START_WEIGHT = 8.0  # of all samples at start together, in samples; they are never forgotten
_USUAL_ERROR = 0.25  # samples that differ from the prediction by a larger factor have less weight
_SPEED_SHARE = 0.05  # of a sample in the ratio of recent results to those that the samples at start predict
_SOLVED_EVERY = 8  # samples
_RIDGE = 1e-9


class LeastSquares:
    """Fits y = coefficients * x, with coefficients of at least 0, such that relative errors are small.

    New samples count more than old ones (recursive least squares with exponential forgetting: Ljung, "System
    Identification", 1999). The samples at start keep a small weight, so that quantities which do not vary in service
    keep their coefficients, relative to the others: all of them follow the speed of recent samples. A sample far from
    the prediction has less influence (Huber, 1964).
    """

    def __init__(self, size: int) -> None:
        self.coefficients = np.zeros(size)
        self._start = np.zeros((size, size)), np.zeros(size)
        self._recent = np.zeros((size, size)), np.zeros(size)
        self._at_start = np.zeros(size)  # coefficients
        self._speed = 1.0  # recent results, divided by those that the samples at start predict
        self._unsolved = 0

    def begin(self, samples: list[tuple[list[float], float]]) -> None:
        """Take the samples at start, (x, y)."""
        matrix, vector = self._start
        for x, y in samples:
            scaled = np.array(x) / y
            matrix += np.outer(scaled, scaled)
            vector += scaled
        self._start = matrix * (_START_WEIGHT / len(samples)), vector * (_START_WEIGHT / len(samples))
        self._solve()
        self._at_start = self.coefficients

    def predict(self, x: list[float]) -> float:
        """Return y for x; 0 when there has been no sample."""
        return float(self.coefficients @ np.array(x))

    def add(self, x: list[float], y: float, predicted: float) -> None:
        """Take a new sample. predicted: what `predict` returned for x, above 0."""
        error = max(y / predicted, predicted / y) - 1
        weight = min(_USUAL_ERROR / error, 1.0) if error else 1.0
        terms = np.array(x)
        change = y / max(float(self._at_start @ terms), 1e-12) / self._speed - 1
        self._speed *= 1 + _SPEED_SHARE * min(max(change, -_USUAL_ERROR), _USUAL_ERROR)
        # Errors are relative to the prediction. If they were relative to y, samples that are too small would count
        # most.
        scaled = terms / predicted
        matrix, vector = self._recent
        kept = 1 - 1 / _MEMORY
        matrix *= kept
        vector *= kept
        matrix += np.outer(scaled, weight * scaled)
        vector += weight * y / predicted * scaled
        self._unsolved += 1
        if self._unsolved >= _SOLVED_EVERY:
            self._solve()

    def _solve(self) -> None:
        self._unsolved = 0
        matrix = self._start[0] + self._recent[0]
        vector = self._start[1] * self._speed + self._recent[1]
        # The quantities have very different sizes.
        scale = 1 / np.sqrt(np.maximum(matrix.diagonal(), 1e-300))
        matrix, vector = matrix * np.outer(scale, scale), vector * scale
        used = vector > 0
        solution = np.zeros_like(vector)
        while used.any():
            part = matrix[np.ix_(used, used)] + _RIDGE * np.eye(int(used.sum()))
            found = np.linalg.solve(part, vector[used])
            solution[:] = 0
            solution[used] = found
            if found.min() >= 0:
                break
            # A coefficient below 0 would say that more work takes less time.
            used[np.flatnonzero(used)[found.argmin()]] = False
        self.coefficients = np.maximum(solution, 0) * scale
