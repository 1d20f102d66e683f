"""Decides when a request that gets no tokens from its decode pod has waited for too long."""

from dataclasses import dataclass
from typing import Literal

from .cost import CostModel
from .router import Route

Stall = Literal["first_token_timeout", "inter_token_timeout"]


@dataclass(frozen=True, slots=True)
class StallTimeouts:
    """Timeouts in seconds. The longest time that computing the prompt may take is added to them."""

    first_token_s: float
    inter_token_s: float
    costs: CostModel

    def stalled(self, route: Route, begun: bool, silent_s: float, num_tokens: int) -> Stall | None:
        """Return the timeout that has passed, if any.

        begun: whether the first token has come. silent_s: time since the last token, or since the request was sent.
        num_tokens: tokens known so far, all of which the pod computes again after a preemption.
        """
        if not begun:
            allowed = self.first_token_s
            if silent_s > allowed and silent_s > allowed + self.costs.longest_prefill(route.prefilling, route.queued):
                return "first_token_timeout"
            return None
        allowed, again = self.inter_token_s, route.decode.prompt_work(num_tokens)
        if silent_s > allowed and silent_s > allowed + self.costs.longest_prefill(route.decode, again):
            return "inter_token_timeout"
        return None
