"""The parts of the time to the first token."""

from .board import Board, Variable
from .panels import SECONDS, SHARE, WIDTH, Query, heatmap_panel, lines
from .queries import buckets, of_model, of_role, quantile, rate, share, shares, total

# In the order in which a request passes through them.
PARTS = ("prepare", "tokenize", "gateway_queue", "route", "prefill_queue", "prefill", "delivery")
_PARTS = "ttft_part_seconds_bucket"


def _part(part: str) -> Query:
    return Query(quantile("$quantile", rate(of_model(_PARTS, f'part="{part}"'))), part)


TTFT = Board(
    "ttft",
    "Where TTFT goes",
    "The parts of the time to the first token, measured by gateways and by pods.",
    rows=[
        (
            "Measured by gateways",
            [
                lines(
                    "Parts",
                    "The selected quantile of each part: validation and chat template; tokenizing; the queue in the "
                    "gateway; routing; the queue on the pod; prefill; delivery, which is the rest, as the network. "
                    "Quantiles of parts do not add up to the quantile of TTFT, which the next panel shows.",
                    SECONDS,
                    *map(_part, PARTS),
                    span=WIDTH * 2 // 3,
                    stacked=True,
                ),
                lines(
                    "TTFT",
                    "The selected quantile of the time to the first token.",
                    SECONDS,
                    Query(
                        quantile("$quantile", rate(of_model("time_to_first_token_seconds_bucket")), "model"),
                        "{{model}}",
                        traced=True,
                    ),
                    span=WIDTH // 3,
                ),
                lines(
                    "Share of each part",
                    "Share of the total time to the first token, over all requests.",
                    SHARE,
                    Query(
                        shares(rate(of_model("ttft_part_seconds_sum")), "part"),
                        "{{part}}",
                    ),
                    stacked=True,
                ),
                heatmap_panel(
                    "Distribution of TTFT",
                    "Number of requests by their time to the first token.",
                    SECONDS,
                    total(rate(of_model("time_to_first_token_seconds_bucket")), "le"),
                    traced=True,
                ),
                lines(
                    "Wait in the gateway",
                    "Time that requests wait in the gateway before it sends them to a pod.",
                    SECONDS,
                    Query(quantile("$quantile", rate(of_model("queue_seconds_bucket")), "model"), "{{model}}"),
                ),
                lines(
                    "Prompts found in prefix caches",
                    "Share of prompt tokens that no pod had to compute.",
                    SHARE,
                    Query(
                        share(
                            total(rate(of_model("cached_prompt_tokens_total")), "model"),
                            total(rate(of_model("prompt_tokens_total")), "model"),
                        ),
                        "{{model}}",
                    ),
                ),
            ],
        ),
        (
            "Measured by pods",
            [
                lines(
                    f"{title}, {role} pods",
                    description,
                    SECONDS,
                    Query(quantile("$quantile", of_role(role, buckets(name)), "instance"), "{{instance}}"),
                )
                for title, name, description in (
                    ("Queue", "request_queue_time_seconds", "From a prompt's arrival until its prefill began."),
                    (
                        "Prefill",
                        "request_prefill_time_seconds",
                        "From the beginning of a prompt's prefill to its end.",
                    ),
                )
                for role in ("prefill", "decode")
            ],
        ),
    ],
    variables=[Variable("quantile", "Quantile", "For all panels except shares.", ("0.95", "0.5", "0.9", "0.99"))],
    by_revision=True,
)
