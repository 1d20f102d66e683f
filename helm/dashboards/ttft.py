"""Where the time to the first token goes."""

from .board import Board, Choice
from .panels import SECONDS, SHARE, WIDTH, Query, heat, lines
from .queries import buckets, of_model, of_role, quantile, rate, share, shares, total

# In the order in which a request meets them.
PARTS = ("prepare", "tokenize", "gateway_queue", "route", "prefill_queue", "prefill", "delivery")
_PARTS = "ttft_part_seconds_bucket"


def _part(part: str) -> Query:
    return Query(quantile("$quantile", rate(of_model(_PARTS, f'part="{part}"'))), part)


TTFT = Board(
    "ttft",
    "Where TTFT goes",
    "What the time to the first token is made of, as gateways measure it and as pods do.",
    rows=[
        (
            "As gateways see it",
            [
                lines(
                    "Parts",
                    "The chosen quantile of each part: checking and templates; tokenizing; the wait in the gateway; "
                    "choosing pods; the wait on the pod; computing the prompt; all else, such as the way there and "
                    "back. Quantiles of parts do not add up to that of the whole, which is beside.",
                    SECONDS,
                    *map(_part, PARTS),
                    span=WIDTH * 2 // 3,
                    stacked=True,
                ),
                lines(
                    "The whole",
                    "The same quantile of the time to the first token.",
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
                    "Of all the time that requests have waited for their first tokens.",
                    SHARE,
                    Query(
                        shares(rate(of_model("ttft_part_seconds_sum")), "part"),
                        "{{part}}",
                    ),
                    stacked=True,
                ),
                heat(
                    "TTFT",
                    "How many first tokens came after so long.",
                    SECONDS,
                    total(rate(of_model("time_to_first_token_seconds_bucket")), "le"),
                    traced=True,
                ),
                lines(
                    "Wait in the gateway",
                    "For their turn, before any pod has them.",
                    SECONDS,
                    Query(quantile("$quantile", rate(of_model("queue_seconds_bucket")), "model"), "{{model}}"),
                ),
                lines(
                    "Prompts found in prefix caches",
                    "Share of the tokens of prompts that no pod had to compute.",
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
            "As pods see it",
            [
                lines(
                    f"{title}, {role} pods",
                    description,
                    SECONDS,
                    Query(quantile("$quantile", of_role(role, buckets(name)), "instance"), "{{instance}}"),
                )
                for title, name, description in (
                    ("Queue", "request_queue_time_seconds", "Until a prompt began to be computed."),
                    (
                        "Prefill",
                        "request_prefill_time_seconds",
                        "From the beginning of a prompt's computing to its end.",
                    ),
                )
                for role in ("prefill", "decode")
            ],
        ),
    ],
    choices=[Choice("quantile", "Quantile", "Of all panels but the shares.", ("0.95", "0.5", "0.9", "0.99"))],
    by_revision=True,
)
