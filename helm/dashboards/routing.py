"""How gateways choose pods."""

from .board import Board
from .panels import COUNT, PER_SECOND, QUANTILES, SECONDS, TOKENS, Query, lines
from .queries import of_model, quantile, rate, total

_LEFT_OUT = of_model("breakers", 'state!="closed"')


def _cached(kind: str) -> str:
    return total(rate(of_model("router_cached_tokens_total", f'kind="{kind}"')), "model")


ROUTING = Board(
    "routing",
    "Routing",
    "Where gateways send prompts for prefill, why, and how well they predict which prefixes pods have cached.",
    rows=[
        (
            "Decisions",
            [
                lines(
                    "Decisions by reason",
                    "Outcome disaggregated: a prefill pod computes the prompt; local: the decode pod does. Reason "
                    "least_ttft: this pod has the lowest predicted TTFT; cached: it has most of the prompt cached; "
                    "policy: the routing policy uses neither.",
                    PER_SECOND,
                    Query(
                        total(rate(of_model("router_decisions_total")), "outcome", "reason"), "{{outcome}}: {{reason}}"
                    ),
                    stacked=True,
                ),
                lines(
                    "Time of a decision",
                    "Includes hashing the prompt's blocks.",
                    SECONDS,
                    *(
                        Query(quantile(q, rate(of_model("router_decision_seconds_bucket"))), f"p{q * 100:g}")
                        for q in QUANTILES
                    ),
                ),
            ],
        ),
        (
            "Predictions and breakers",
            [
                lines(
                    "Cached tokens",
                    "Prompt tokens in the prefix cache of the pod that computes the prompt: predicted by gateways, and "
                    "found by pods. Pods find less after evictions, and more when other prompts have just filled the "
                    "cache.",
                    TOKENS,
                    Query(_cached("predicted"), "{{model}} predicted"),
                    Query(_cached("actual"), "{{model}} found"),
                ),
                lines(
                    "Breakers",
                    "Pods that get no requests after repeated failures (open), or one trial request (half_open). Shows "
                    "the gateway with the largest number.",
                    COUNT,
                    Query(f"max by (model, pool, role, state) ({_LEFT_OUT})", "{{model}} {{pool}} {{role}}: {{state}}"),
                ),
            ],
        ),
    ],
)
