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
    "Where gateways send prompts to be computed and why, and how well they know what pods have cached.",
    rows=[
        (
            "Decisions",
            [
                lines(
                    "Decisions by reason",
                    "disaggregated: a prefill pod computes the prompt, local: the decode pod itself. least_ttft: "
                    "predicted to be the soonest; cached: most of the prompt is cached there; policy: the policy looks "
                    "at neither.",
                    PER_SECOND,
                    Query(
                        total(rate(of_model("router_decisions_total")), "outcome", "reason"), "{{outcome}}: {{reason}}"
                    ),
                    stacked=True,
                ),
                lines(
                    "Time of a decision",
                    "Hashing the prompt's blocks included.",
                    SECONDS,
                    *(
                        Query(quantile(q, rate(of_model("router_decision_seconds_bucket"))), f"p{q * 100:g}")
                        for q in QUANTILES
                    ),
                ),
            ],
        ),
        (
            "What it knows",
            [
                lines(
                    "Cached tokens",
                    "Tokens of prompts that the pod which computes them has cached: as gateways predicted, and as pods "
                    "found. Less is found where blocks are evicted meanwhile, more where others' prompts bring them.",
                    TOKENS,
                    Query(_cached("predicted"), "{{model}} predicted"),
                    Query(_cached("actual"), "{{model}} found"),
                ),
                lines(
                    "Breakers",
                    "Pods that are left out after repeated failures (open), or that one request tries (half_open), as "
                    "the gateway with the most sees it.",
                    COUNT,
                    Query(f"max by (model, pool, role, state) ({_LEFT_OUT})", "{{model}} {{pool}} {{role}}: {{state}}"),
                ),
            ],
        ),
    ],
)
