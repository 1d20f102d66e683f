"""The cost of tokens."""

from .board import Board
from .panels import COUNT, DOLLARS, TOKENS, WIDTH, Query, lines, number
from .queries import count, of_model, rate, recorded, share, total, worker

_PER_HOUR = recorded("cost_per_hour")
# Average over the dashboard's time range, because the current price jumps with the load. The inner sum is evaluated at
# each time, because pods come and go.
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
    "Cost by the prices in the chart's cost.gpuHourPrice, with one GPU per worker pod. Gateways and idle nodes are not "
    "included.",
    rows=[
        (
            "In the selected time range",
            [
                number("Per hour", "All worker pods.", DOLLARS, _AVERAGE_PER_HOUR, span=6),
                number(
                    "Per million output tokens",
                    "The total cost divided by the generated tokens.",
                    DOLLARS,
                    _per_million(_OUTPUT),
                    span=6,
                ),
                number(
                    "Per million tokens",
                    "The total cost divided by the tokens of prompts and answers.",
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
                    "Prefill pods' cost divided by prompt tokens, and decode pods' cost divided by generated tokens. "
                    "Idle pods make tokens expensive. Without prefill pods, prompt tokens have no price of their own.",
                    DOLLARS,
                    Query(recorded("cost_per_1m_tokens:rate5m"), "{{model}} {{kind}}"),
                ),
                lines(
                    "GPU-seconds per 1,000 output tokens",
                    "GPU time of the pods of each role, independent of prices.",
                    _GPU_SECONDS,
                    Query(recorded("gpu_seconds_per_1k_output_tokens:rate5m"), "{{model}} {{role}}"),
                    stacked=True,
                ),
                lines(
                    "Cost per hour",
                    "Cost by model and role of the pods.",
                    DOLLARS,
                    Query(_PER_HOUR, "{{model}} {{role}}"),
                    stacked=True,
                    span=WIDTH // 3,
                ),
                lines(
                    "Tokens",
                    "Tokens of all selected models.",
                    TOKENS,
                    Query(total(rate(of_model(_PROMPT))), "prompt"),
                    Query(total(rate(of_model(_OUTPUT))), "output"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Output by GPU",
                    "Generated tokens per worker pod.",
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
                    "A tenant's cost is its prompt tokens and generated tokens, each at the model's price for them.",
                    DOLLARS,
                    Query(recorded("tenant_cost_per_hour:rate5m"), "{{tenant}} {{model}}"),
                    stacked=True,
                ),
                lines(
                    "Cost per million tokens of tenants",
                    "The tenant's cost divided by its tokens. Long answers and short prompts raise it.",
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
