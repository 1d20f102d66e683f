"""The dashboards of prefill pods and of decode pods."""

from .board import Board
from .panels import COUNT, PER_SECOND, QUANTILES, SECONDS, SHARE, TOKENS, Panel, Query, heatmap_panel, lines
from .queries import buckets, of_role, quantile, rate, share, total, vllm, worker


def _by_pod(role: str, title: str, description: str, unit: str, expression: str) -> Panel:
    return lines(title, description, unit, Query(of_role(role, expression), "{{instance}} {{revision}}"))


def _quantiles(role: str, title: str, description: str, histogram: str, unit: str = SECONDS) -> Panel:
    rates = of_role(role, buckets(histogram))
    queries = (Query(quantile(q, rates, "revision"), f"{{{{revision}}}} p{q * 100:g}") for q in QUANTILES)
    return lines(title, description, unit, *queries)


def _heatmap(
    role: str, title: str, description: str, histogram: str, unit: str = SECONDS, traced: bool = False
) -> Panel:
    return heatmap_panel(title, description, unit, total(of_role(role, buckets(histogram)), "le"), traced=traced)


def _cache(role: str) -> tuple[Panel, Panel]:
    hits, queries = (of_role(role, rate(vllm(f"prefix_cache_{name}_total"))) for name in ("hits", "queries"))
    return (
        _by_pod(
            role,
            "KV blocks in use",
            "Share of all KV blocks. Blocks that are only cached do not count.",
            SHARE,
            vllm("kv_cache_usage_perc"),
        ),
        lines(
            "Found in the prefix cache",
            "Share of the tokens that were looked up.",
            SHARE,
            Query(share(total(hits, "instance"), total(queries, "instance")), "{{instance}}"),
        ),
    )


def _batch(role: str) -> tuple[Panel, ...]:
    return (
        _by_pod(role, "Running", "Requests in the batch of the engine.", COUNT, vllm("num_requests_running")),
        _by_pod(role, "Waiting", "Requests in the queue of the engine.", COUNT, vllm("num_requests_waiting")),
        _heatmap(role, "Tokens of a step", "Prefill chunks and decodes together.", "iteration_tokens_total", COUNT),
    )


def _compilations(role: str) -> Panel:
    return _by_pod(
        role,
        "Kernels compiled late",
        "After the pod was ready. Each of them halted all requests of the pod.",
        PER_SECOND,
        rate(worker("engine_compilations_total")),
    )


def _step_times(role: str) -> Panel:
    rates = of_role(role, rate(worker("step_time_ratio_bucket")))
    return lines(
        "Time of steps, by the prediction",
        "Divided by the time that the engine predicts, by which it bounds chunks and the gateway chooses pods.",
        COUNT,
        *(Query(quantile(q, rates, "kind"), f"{{{{kind}}}} p{q * 100:g}") for q in QUANTILES),
    )


PREFILL = Board(
    "prefill-pool",
    "Prefill pool",
    "Pods that compute prompts and hand their KV over to decode pods.",
    rows=[
        (
            "Load",
            [
                *_batch("prefill"),
                _by_pod(
                    "prefill",
                    "Prompt tokens",
                    "Tokens of new prompts, including cached tokens.",
                    TOKENS,
                    rate(vllm("prompt_tokens_total")),
                ),
            ],
        ),
        (
            "Time",
            [
                _quantiles(
                    "prefill", "Queue", "From a prompt's arrival until its prefill began.", "request_queue_time_seconds"
                ),
                _quantiles(
                    "prefill",
                    "Prefill",
                    "From the start of the prefill to the first token.",
                    "request_prefill_time_seconds",
                ),
                _heatmap(
                    "prefill",
                    "First tokens",
                    "Time from a ticket's arrival until its first token.",
                    "time_to_first_token_seconds",
                    traced=True,
                ),
                _quantiles("prefill", "Length of prompts", "In tokens.", "request_prompt_tokens", COUNT),
                _compilations("prefill"),
                _step_times("prefill"),
            ],
        ),
        (
            "Memory",
            [
                *_cache("prefill"),
                lines(
                    "Pinned blocks",
                    "Blocks that stay until decode pods have fetched them or the lease ends.",
                    COUNT,
                    Query(worker("pinned_blocks"), "{{instance}}"),
                ),
                _by_pod(
                    "prefill",
                    "Preemptions",
                    "Requests that lost their blocks to other requests.",
                    PER_SECOND,
                    rate(vllm("num_preemptions_total")),
                ),
            ],
        ),
    ],
    by_revision=True,
)

DECODE = Board(
    "decode-pool",
    "Decode pool",
    "Pods that generate tokens.",
    rows=[
        (
            "Load",
            [
                *_batch("decode"),
                _by_pod("decode", "Output", "Generated tokens.", TOKENS, rate(vllm("generation_tokens_total"))),
            ],
        ),
        (
            "Time",
            [
                _heatmap("decode", "Time between tokens", "Of each request.", "inter_token_latency_seconds"),
                _quantiles("decode", "Time between tokens", "Of each request.", "inter_token_latency_seconds"),
                _quantiles(
                    "decode",
                    "Time of decoding",
                    "From the first token of a request to its last.",
                    "request_decode_time_seconds",
                ),
                _quantiles("decode", "Length of answers", "In tokens.", "request_generation_tokens", COUNT),
                _compilations("decode"),
                _step_times("decode"),
            ],
        ),
        (
            "Memory",
            [
                *_cache("decode"),
                _by_pod(
                    "decode",
                    "Preemptions",
                    "Requests that lost their blocks to other requests and are recomputed.",
                    PER_SECOND,
                    rate(vllm("num_preemptions_total")),
                ),
                lines(
                    "Requests that ended",
                    "By finish reason.",
                    PER_SECOND,
                    Query(
                        total(of_role("decode", rate(vllm("request_success_total"))), "finished_reason"),
                        "{{finished_reason}}",
                    ),
                    stacked=True,
                ),
            ],
        ),
    ],
    by_revision=True,
)
