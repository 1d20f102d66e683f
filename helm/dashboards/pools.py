"""The pods of each role."""

from .board import Board
from .panels import COUNT, PER_SECOND, QUANTILES, SECONDS, SHARE, TOKENS, Panel, Query, heat, lines
from .queries import buckets, of_role, quantile, rate, share, total, vllm, worker


def _by_pod(role: str, title: str, description: str, unit: str, expression: str) -> Panel:
    return lines(title, description, unit, Query(of_role(role, expression), "{{instance}} {{revision}}"))


def _quantiles(role: str, title: str, description: str, histogram: str, unit: str = SECONDS) -> Panel:
    rates = of_role(role, buckets(histogram))
    queries = (Query(quantile(q, rates, "revision"), f"{{{{revision}}}} p{q * 100:g}") for q in QUANTILES)
    return lines(title, description, unit, *queries)


def _heat(role: str, title: str, description: str, histogram: str, unit: str = SECONDS, traced: bool = False) -> Panel:
    return heat(title, description, unit, total(of_role(role, buckets(histogram)), "le"), traced=traced)


def _cache(role: str) -> tuple[Panel, Panel]:
    hits, queries = (of_role(role, rate(vllm(f"prefix_cache_{name}_total"))) for name in ("hits", "queries"))
    return (
        _by_pod(
            role,
            "KV blocks in use",
            "Part of all; what is only cached is not in use.",
            SHARE,
            vllm("kv_cache_usage_perc"),
        ),
        lines(
            "Found in the prefix cache",
            "Share of the tokens looked up.",
            SHARE,
            Query(share(total(hits, "instance"), total(queries, "instance")), "{{instance}}"),
        ),
    )


def _batch(role: str) -> tuple[Panel, ...]:
    return (
        _by_pod(role, "Running", "Requests in the batch of the engine.", COUNT, vllm("num_requests_running")),
        _by_pod(role, "Waiting", "Requests that wait to be computed.", COUNT, vllm("num_requests_waiting")),
        _heat(role, "Tokens of a step", "Prompts' chunks and decodes together.", "iteration_tokens_total", COUNT),
    )


PREFILL = Board(
    "prefill-pool",
    "Prefill pool",
    "Pods that compute prompts and hand their KV over.",
    rows=[
        (
            "Load",
            [
                *_batch("prefill"),
                _by_pod(
                    "prefill",
                    "Prompt tokens",
                    "Taken in, cached ones included.",
                    TOKENS,
                    rate(vllm("prompt_tokens_total")),
                ),
            ],
        ),
        (
            "Time",
            [
                _quantiles("prefill", "Queue", "Until a prompt began to be computed.", "request_queue_time_seconds"),
                _quantiles("prefill", "Prefill", "From then until its first token.", "request_prefill_time_seconds"),
                _heat(
                    "prefill", "First tokens", "From a ticket's arrival on.", "time_to_first_token_seconds", traced=True
                ),
                _quantiles("prefill", "Length of prompts", "In tokens.", "request_prompt_tokens", COUNT),
            ],
        ),
        (
            "Memory",
            [
                *_cache("prefill"),
                lines(
                    "Pinned blocks",
                    "Until decode pods have them or the lease ends.",
                    COUNT,
                    Query(worker("pinned_blocks"), "{{instance}}"),
                ),
                _by_pod(
                    "prefill",
                    "Preemptions",
                    "Requests that lost their blocks to others.",
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
    "Pods that generate.",
    rows=[
        (
            "Load",
            [
                *_batch("decode"),
                _by_pod("decode", "Output", "Tokens generated.", TOKENS, rate(vllm("generation_tokens_total"))),
            ],
        ),
        (
            "Time",
            [
                _heat("decode", "Time between tokens", "Of each request.", "inter_token_latency_seconds"),
                _quantiles("decode", "Time between tokens", "Of each request.", "inter_token_latency_seconds"),
                _quantiles(
                    "decode",
                    "Time of decoding",
                    "From the first token of a request to its last.",
                    "request_decode_time_seconds",
                ),
                _quantiles("decode", "Length of answers", "In tokens.", "request_generation_tokens", COUNT),
            ],
        ),
        (
            "Memory",
            [
                *_cache("decode"),
                _by_pod(
                    "decode",
                    "Preemptions",
                    "Requests that lost their blocks to others, and are computed again.",
                    PER_SECOND,
                    rate(vllm("num_preemptions_total")),
                ),
                lines(
                    "Requests that ended",
                    "By what ended them.",
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
