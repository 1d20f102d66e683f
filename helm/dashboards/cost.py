"""What tokens cost."""

from .board import Board, Text
from .panels import COUNT, DOLLARS, SHARE, TOKENS, WIDTH, Query, lines, number
from .queries import count, gateway, of_model, rate, share, shares, total, worker

_PODS = count(worker("worker_info"))
_PER_HOUR = f"{_PODS} * $gpu_hour_price"
_OUTPUT = total(rate(of_model("generation_tokens_total")))
_PROMPT = total(rate(of_model("prompt_tokens_total")))
_THOUSAND = 1000 / 3600  # thousand tokens for one a second over an hour


def _per_thousand(tokens: str) -> str:
    return share(f"{_PER_HOUR} * {_THOUSAND:.6f}", f"({tokens})")


COST = Board(
    "cost",
    "Cost",
    "Cost by the price of a GPU-hour, with one GPU to each worker pod. Gateways and idle nodes are not in it.",
    rows=[
        (
            "Now",
            [
                number("Per hour", "All worker pods.", DOLLARS, _PER_HOUR, span=6),
                number(
                    "Per 1,000 output tokens",
                    "All cost on the tokens generated.",
                    DOLLARS,
                    _per_thousand(_OUTPUT),
                    span=6,
                ),
                number(
                    "Per 1,000 tokens",
                    "Of prompts and answers alike.",
                    DOLLARS,
                    _per_thousand(f"{_OUTPUT} + {_PROMPT}"),
                    span=6,
                ),
                number("Worker pods", "Each with a GPU.", COUNT, _PODS, span=6),
            ],
        ),
        (
            "In time",
            [
                lines(
                    "Cost per 1,000 tokens",
                    "Idle pods make tokens dear.",
                    DOLLARS,
                    Query(_per_thousand(_OUTPUT), "output"),
                    Query(_per_thousand(f"{_OUTPUT} + {_PROMPT}"), "prompt and output"),
                ),
                lines(
                    "Cost per hour",
                    "By the role of pods.",
                    DOLLARS,
                    Query(f"{count(worker('worker_info'), 'model', 'role')} * $gpu_hour_price", "{{model}} {{role}}"),
                    stacked=True,
                ),
                lines(
                    "Tokens",
                    "Of all chosen models.",
                    TOKENS,
                    Query(_PROMPT, "prompt"),
                    Query(_OUTPUT, "output"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Output by GPU",
                    "Tokens generated, for each worker pod.",
                    TOKENS,
                    Query(f"{_OUTPUT} / {_PODS}", "output"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Share of tenants",
                    "Of all tokens, prompts and answers alike, of all models.",
                    SHARE,
                    Query(
                        shares(rate(gateway("tenant_tokens_total")), "tenant"),
                        "{{tenant}}",
                    ),
                    span=WIDTH // 3,
                    stacked=True,
                ),
            ],
        ),
    ],
    choices=[Text("gpu_hour_price", "GPU-hour, $", "What an hour of one GPU costs.", "3")],
    by_revision=True,
)
