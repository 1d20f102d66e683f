"""A model's revisions side by side."""

from .board import Board
from .panels import COUNT, QUANTILES, REQUESTS, SECONDS, SHARE, TOKENS, WIDTH, Query, lines
from .queries import controller, count, of_revision, of_role, quantile, rate, share, total, vllm, worker

_KEY = ("model", "revision")
_LEGEND = "{{model}} {{revision}}"
_REQUESTS = total(rate(of_revision("requests_total")), *_KEY)
_ERRORS = total(rate(of_revision("requests_total", 'outcome="error"')), *_KEY)


def _latency(name: str, traced: bool = False) -> list[Query]:
    rates = rate(of_revision(f"{name}_seconds_bucket"))
    return [
        Query(quantile(q, rates, *_KEY), f"{_LEGEND} p{q * 100:g}", traced=traced and q == QUANTILES[-1])
        for q in QUANTILES
    ]


CANARY = Board(
    "canary",
    "Canary",
    "The revisions of each model side by side. A request that failed on one revision and continued on another counts "
    "as an error of the first.",
    rows=[
        (
            "Latency and errors",
            [
                lines(
                    "TTFT",
                    "From sending a request to a pod until its first token.",
                    SECONDS,
                    *_latency("time_to_first_token", traced=True),
                ),
                lines(
                    "TPOT", "Mean time between the tokens of a request.", SECONDS, *_latency("time_per_output_token")
                ),
                lines(
                    "Share of errors",
                    "Failed requests divided by all requests on the revision's pods.",
                    SHARE,
                    Query(share(f"({_ERRORS} or {_REQUESTS} * 0)", _REQUESTS), _LEGEND),
                ),
                lines("Requests", "Includes shadow copies.", REQUESTS, Query(_REQUESTS, _LEGEND), stacked=True),
            ],
        ),
        (
            "Pods",
            [
                lines(
                    "Pods",
                    "Number of pods by revision and role.",
                    COUNT,
                    Query(count(worker("worker_info"), *_KEY, "role"), f"{_LEGEND} {{{{role}}}}"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Output",
                    "Generated tokens.",
                    TOKENS,
                    Query(total(of_role("decode", rate(vllm("generation_tokens_total"))), "revision"), "{{revision}}"),
                    span=WIDTH // 3,
                ),
                lines(
                    "KV blocks in use",
                    "Share of all KV blocks, on decode pods.",
                    SHARE,
                    Query(f"avg by (revision) ({of_role('decode', vllm('kv_cache_usage_perc'))})", "{{revision}}"),
                    span=WIDTH // 3,
                ),
            ],
        ),
        (
            "Controller",
            [
                lines(
                    "Weight",
                    "Percent of the model's sessions that the canary gets.",
                    COUNT,
                    Query(controller("canary_weight"), "{{model}}"),
                ),
                lines(
                    "Rollbacks",
                    "Rollbacks in the selected time range.",
                    COUNT,
                    Query(f"increase({controller('canary_rollbacks_total')}[$__range])", "{{model}}"),
                ),
            ],
        ),
    ],
    by_revision=True,
)
