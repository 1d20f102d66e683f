"""Chooses the pods of a request. Plain state in, decision out: no clock, no network."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton_gateway.pods import Pod


@dataclass(slots=True)
class Route:
    """A decision, and the charge it put on its pods; each part is given back once."""

    decode: Pod
    prefill: Pod | None
    prompt_tokens: int
    _prefill_charged: bool = True
    _decode_charged: bool = True

    def prefilled(self) -> None:
        """Give back the prefill pod's charge: the prompt is computed."""
        if self._prefill_charged:
            self._prefill_charged = False
            if self.prefill is not None:
                self.prefill.charged -= self.prompt_tokens

    def done(self) -> None:
        """Give back all: the request is over."""
        self.prefilled()
        if self._decode_charged:
            self._decode_charged = False
            self.decode.charged -= 1


class Router:
    """Least loaded decode pod, and of its revision the prefill pod with the fewest queued tokens."""

    def __init__(self, decodes: Sequence[Pod], prefills: Sequence[Pod]) -> None:
        self.decodes = decodes
        self.prefills = prefills

    def dispatch(self, prompt_tokens: int, exclude: Collection[str] = ()) -> Route | None:
        """Choose pods and charge them; None when no decode pod is live.

        exclude: addresses of decode pods that must not be chosen.
        """
        decode = _least_loaded([pod for pod in self.decodes if pod.live and pod.address not in exclude])
        if decode is None:
            return None
        prefill = _least_loaded([pod for pod in self.prefills if pod.live and pod.revision == decode.revision])
        decode.charged += 1
        decode.dispatched += 1
        if prefill is not None:
            prefill.charged += prompt_tokens
            prefill.dispatched += 1
        return Route(decode, prefill, prompt_tokens)

    @property
    def ready(self) -> bool:
        """A decode pod is live and, where there are prefill pods at all, one of the same revision is too."""
        decoding = {pod.revision for pod in self.decodes if pod.live}
        if not self.prefills:
            return bool(decoding)
        return any(pod.live and pod.revision in decoding for pod in self.prefills)


def _least_loaded(pods: Sequence[Pod]) -> Pod | None:
    """Return the pod with the least load; of equals, the one chosen least often."""
    return min(pods, key=lambda pod: (pod.load, pod.dispatched), default=None)
