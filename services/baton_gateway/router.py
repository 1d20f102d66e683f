"""Chooses the pods of a request. Plain state in, decision out: no clock, no network."""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton_gateway.pods import Pod

MOST_PREFILLS = 3  # prefill pods that a request may be handed to, one after another


@dataclass(slots=True)
class Route:
    """A decision, and the charge it put on its pods; each part is given back once.

    prefills: the pod that is to prefill, and those to be asked if it fails.
    """

    decode: Pod
    prefills: Sequence[Pod]
    prompt_tokens: int
    _prefill_charged: bool = True
    _decode_charged: bool = True

    def prefilled(self) -> None:
        """Give back the prefill pod's charge: the prompt is computed."""
        if self._prefill_charged:
            self._prefill_charged = False
            for prefill in self.prefills[:1]:
                prefill.charged -= self.prompt_tokens

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

    def dispatch(self, prompt_tokens: int, avoid: Collection[str] = (), fingerprint: str | None = None) -> Route | None:
        """Choose pods and charge them; None when no decode pod is live.

        avoid: addresses of decode pods that are only chosen when there is no other. fingerprint: only pods with this
        one; others serve other weights.
        """
        live = [pod for pod in self.decodes if pod.live and fingerprint in (None, pod.fingerprint)]
        decode = min(live, key=lambda pod: (pod.address in avoid, *_by_load(pod)), default=None)
        if decode is None:
            return None
        prefills = heapq.nsmallest(MOST_PREFILLS, self.partners(decode), key=_by_load)
        decode.charged += 1
        decode.dispatched += 1
        for prefill in prefills[:1]:
            prefill.charged += prompt_tokens
            prefill.dispatched += 1
        return Route(decode, prefills, prompt_tokens)

    def partners(self, decode: Pod) -> list[Pod]:
        """Return the prefill pods that may work with a decode pod."""
        return [pod for pod in self.prefills if pod.live and pod.revision == decode.revision]

    @property
    def ready(self) -> bool:
        """A decode pod is live and, where there are prefill pods at all, one of the same revision is too."""
        decoding = {pod.revision for pod in self.decodes if pod.live}
        if not self.prefills:
            return bool(decoding)
        return any(pod.live and pod.revision in decoding for pod in self.prefills)


def _by_load(pod: Pod) -> tuple[int, int]:
    """Sort key: the least load first; of equals, the one chosen least often."""
    return pod.load, pod.dispatched
