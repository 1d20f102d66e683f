"""Which numbers of tokens a device computes well.

A GPU computes a product in tiles, at a time as many as it has multiprocessors, so the time of a step grows with its
tokens in stairs. On an H200, steps of Llama-3.1-8B with 1,024, 1,088 and 1,280 tokens take 20, 26 and 26 ms.
"""

# A chunk may have between these fractions of the tokens that its time allows.
_LEAST, _MOST = 0.85, 1.05
# Tokens cost little if they take at most this fraction of the usual time of as many.
_CHEAP = 0.5
_MOST_MORE = 1024  # a longer part of a further prompt is no mere filling


class StepSizes:
    """The seconds of steps that were measured, by tokens. Without measurements all numbers of tokens are alike."""

    def __init__(self, seconds: dict[int, float] | None = None) -> None:
        self._seconds = dict(sorted((seconds or {}).items()))

    def best_near(self, tokens: int) -> int | None:
        """Return the number near `tokens` whose tokens take the least time each; None = none near it was measured."""
        near = {size: s / size for size, s in self._seconds.items() if _LEAST * tokens <= size <= _MOST * tokens}
        return min(near, key=near.__getitem__, default=None)

    def filled(self, tokens: int) -> int:
        """Return the number to which a step of so many tokens gains most by having more of them at little cost."""
        larger = {size: s for size, s in self._seconds.items() if tokens <= size <= tokens + _MOST_MORE}
        if not larger or tokens < min(self._seconds):
            return tokens
        own, (largest, longest) = next(iter(larger.values())), max(self._seconds.items())
        cheap = _CHEAP * longest / largest
        gains = {size: cheap * (size - tokens) - (s - own) for size, s in larger.items()}
        best = max(gains, key=gains.__getitem__)
        return best if gains[best] > 0 else tokens
