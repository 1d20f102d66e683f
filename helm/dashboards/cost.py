"""What tokens cost."""

from .board import Board
from .panels import COUNT, DOLLARS, TOKENS, WIDTH, Query, lines, number
from .queries import count, of_model, rate, recorded, share, total, worker

_PER_HOUR = recorded("cost_per_hour")
# Over the time shown, as prices of now jump with the load; a sum at each time, as pods come and go.
_AVERAGE_PER_HOUR = f"avg_over_time({total(_PER_HOUR)}[$__range:])"
_PODS = count(worker("worker_info"))
_OUTPUT, _PROMPT = (f"{kind}_tokens_total" for kind in ("generation", "prompt"))
_MILLION_PER_HOUR = 1e6 / 3600
_GPU_SECONDS = "GPU-seconds"
_TENANT = ("tenant", "model")


def _per_million(*tokens: str) -> str:
    rates = " + ".join(f"sum(rate({of_model(name)}[$__range]))" for name in tokens)
    return share(f"{_AVERAGE_PER_HOUR} * {_MILLION_PER_HOUR:.6f}", f"({rates})")


COST = Board(
    "cost",
    "Cost",
    "Cost by the prices of the chart's cost.gpuHourPrice, with one GPU to each worker pod. Gateways and idle nodes are "
    "not in it.",
    rows=[
        (
            "In the time shown",
            [
                number("Per hour", "All worker pods.", DOLLARS, _AVERAGE_PER_HOUR, span=6),
                number(
                    "Per million output tokens",
                    "All cost on the tokens generated.",
                    DOLLARS,
                    _per_million(_OUTPUT),
                    span=6,
                ),
                number(
                    "Per million tokens",
                    "Of prompts and answers alike.",
                    DOLLARS,
                    _per_million(_OUTPUT, _PROMPT),
                    span=6,
                ),
                number("Worker pods", "Each with a GPU.", COUNT, _PODS, span=6),
            ],
        ),
        (
            "By model",
            [
                lines(
                    "Cost per million tokens",
                    "Of prefill pods on tokens of prompts, of decode pods on tokens generated. Idle pods make tokens "
                    "dear. Where decode pods compute all prompts, these have no price of their own.",
                    DOLLARS,
                    Query(recorded("cost_per_1m_tokens:rate5m"), "{{model}} {{kind}}"),
                ),
                lines(
                    "GPU-seconds per 1,000 output tokens",
                    "Of the pods of each role, whatever their price.",
                    _GPU_SECONDS,
                    Query(recorded("gpu_seconds_per_1k_output_tokens:rate5m"), "{{model}} {{role}}"),
                    stacked=True,
                ),
                lines(
                    "Cost per hour",
                    "By the role of pods.",
                    DOLLARS,
                    Query(_PER_HOUR, "{{model}} {{role}}"),
                    stacked=True,
                    span=WIDTH // 3,
                ),
                lines(
                    "Tokens",
                    "Of all chosen models.",
                    TOKENS,
                    Query(total(rate(of_model(_PROMPT))), "prompt"),
                    Query(total(rate(of_model(_OUTPUT))), "output"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Output by GPU",
                    "Tokens generated, for each worker pod.",
                    TOKENS,
                    Query(f"{total(rate(of_model(_OUTPUT)))} / {_PODS}", "output"),
                    span=WIDTH // 3,
                ),
            ],
        ),
        (
            "By tenant",
            [
                lines(
                    "Cost per hour of tenants",
                    "Each pays for its part of a model's tokens, of prompts and generated ones at their own prices.",
                    DOLLARS,
                    Query(recorded("tenant_cost_per_hour:rate5m"), "{{tenant}} {{model}}"),
                    stacked=True,
                ),
                lines(
                    "Cost per million tokens of tenants",
                    "Of prompts and answers alike: long answers and short prompts make it more.",
                    DOLLARS,
                    Query(
                        share(
                            f"{total(recorded('tenant_cost_per_hour:rate5m'), *_TENANT)} * {_MILLION_PER_HOUR:.6f}",
                            total(f"rate({of_model('tenant_tokens_total')}[5m])", *_TENANT),
                        ),
                        "{{tenant}} {{model}}",
                    ),
                ),
            ],
        ),
    ],
    by_revision=True,
)
