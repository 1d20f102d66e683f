"""The health of Baton as a whole, and its service level objectives."""

from .board import Board
from .panels import COUNT, PER_SECOND, QUANTILES, REQUESTS, SECONDS, SHARE, TOKENS, WIDTH, Query, lines, number
from .queries import controller, gateway, objective, of_model, quantile, rate, recorded, share, total

_REQUESTS = total(rate(gateway("requests_total", 'route=~"/v1/.*"')))
_ERRORS = total(rate(gateway("requests_total", 'route=~"/v1/.*"', 'status=~"5.."'))) + " or vector(0)"
_TTFT = rate(of_model("time_to_first_token_seconds_bucket"))
_ITL = rate(of_model("inter_token_latency_seconds_bucket"))

_OBJECTIVE = Query(objective("objective:ratio"), "objective")


def _in_time(latency: str) -> Query:
    return Query(f"1 - {recorded(f'{latency}_slow:ratio_rate5m')}", "{{model}}")


OVERVIEW = Board(
    "overview",
    "Overview and SLO",
    "Load, errors and latency as clients see them, and the state of the pods.",
    rows=[
        (
            "Now",
            [
                number("Requests", "Requests to the API, of all models.", REQUESTS, _REQUESTS),
                number("Errors", "Share of requests answered with 5xx.", SHARE, share(f"({_ERRORS})", _REQUESTS)),
                number("TTFT p95", "From a request's arrival to its first token.", SECONDS, quantile(0.95, _TTFT)),
                number("ITL p95", "Time between two tokens of a request.", SECONDS, quantile(0.95, _ITL)),
                number("Output", "Generated tokens.", TOKENS, total(rate(of_model("generation_tokens_total")))),
                number("Waiting", "Requests that wait in gateways.", COUNT, total(of_model("requests_waiting"))),
            ],
        ),
        (
            "SLO",
            [
                lines(
                    "First tokens in time",
                    "Share of requests whose first token came within the chart's slo.ttftSeconds.",
                    SHARE,
                    _in_time("ttft"),
                    _OBJECTIVE,
                ),
                lines(
                    "Fast enough answers",
                    "Share of requests whose mean time per output token was within the chart's slo.tpotSeconds.",
                    SHARE,
                    _in_time("tpot"),
                    _OBJECTIVE,
                ),
                lines(
                    "TTFT",
                    "From a request's arrival at a gateway to its first token.",
                    SECONDS,
                    *(
                        Query(quantile(q, _TTFT, "model"), f"{{{{model}}}} p{q * 100:g}", traced=q == QUANTILES[-1])
                        for q in QUANTILES
                    ),
                    Query(objective("ttft_seconds"), "objective"),
                ),
                lines(
                    "Time between tokens",
                    "Time between the arrivals of a request's tokens at a gateway. Each write to the client is one "
                    "sample.",
                    SECONDS,
                    *(Query(quantile(q, _ITL, "model"), f"{{{{model}}}} p{q * 100:g}") for q in QUANTILES),
                ),
            ],
        ),
        (
            "Requests",
            [
                lines(
                    "Requests by status",
                    "Requests to the API. 499: the client disconnected.",
                    REQUESTS,
                    Query(total(rate(gateway("requests_total", 'route=~"/v1/.*"')), "status"), "{{status}}"),
                    stacked=True,
                ),
                lines(
                    "Duration by route",
                    "From a request's arrival to its end, 95th percentile.",
                    SECONDS,
                    Query(
                        quantile(0.95, rate(gateway("e2e_request_latency_seconds_bucket", 'route=~"/v1/.*"')), "route"),
                        "{{route}}",
                    ),
                ),
                lines(
                    "Tokens",
                    "Tokens of prompts, those of them found in a prefix cache, and tokens of answers.",
                    TOKENS,
                    *(
                        Query(total(rate(of_model(f"{name}_total"))), legend)
                        for name, legend in (
                            ("prompt_tokens", "prompt"),
                            ("cached_prompt_tokens", "prompt, cached"),
                            ("generation_tokens", "output"),
                        )
                    ),
                ),
                lines(
                    "Retried, continued, broken and refused requests",
                    "Requests sent to another decode pod before their first token; streams continued on another pod; "
                    "answers that ended with an error after they had begun; requests refused for lack of capacity.",
                    PER_SECOND,
                    Query(total(rate(gateway("retries_total"))), "sent elsewhere"),
                    Query(total(rate(gateway("resumed_streams_total"))), "continued elsewhere"),
                    Query(total(rate(of_model("broken_streams_total"))), "broken"),
                    Query(
                        total(rate(gateway("refused_requests_total", 'reason="server_is_overloaded"')))
                        + " or vector(0)",
                        "refused",
                    ),
                ),
                lines(
                    "Requests that left a decode pod before their end",
                    "By reason. A timeout means that the pod was live but sent no token of the request. "
                    "`retry budget spent` counts retries that were delayed or refused.",
                    PER_SECOND,
                    Query(total(rate(of_model("pod_departures_total")), "reason"), "{{reason}}"),
                    Query(total(rate(of_model("retry_budget_exhausted_total"))), "retry budget spent"),
                ),
            ],
        ),
        (
            "Pods",
            [
                lines(
                    "Live pods",
                    "Pods that accept requests. Shows the gateway with the smallest number.",
                    COUNT,
                    Query(f"min by (model, pool, role) ({of_model('live_pods')})", "{{model}} {{pool}} {{role}}"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Requests in flight and waiting",
                    "Requests in progress, and those of them that wait in a gateway.",
                    COUNT,
                    Query(total(gateway("requests_in_flight")), "in flight"),
                    Query(total(of_model("requests_waiting"), "model", "pool"), "waiting: {{model}} {{pool}}"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Requests by outcome on pods",
                    "A request that failed on one pod and continued on another counts as an error here, although its "
                    "client sees none.",
                    REQUESTS,
                    Query(total(rate(of_model("revision_requests_total")), "outcome"), "{{outcome}}"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Desired replicas",
                    "Replicas that the controller requests for models that it scales.",
                    COUNT,
                    Query(controller("desired_replicas"), "{{model}} {{role}}"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Draining",
                    "Gateways and workers that accept no new requests.",
                    COUNT,
                    Query(total(gateway("draining")), "gateways"),
                    Query('sum(baton_worker_draining{namespace=~"$namespace", model=~"$model"})', "workers"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Redis",
                    "1 while a gateway can reach Redis, and the number of entries that are not valid keys. Empty "
                    "without Redis.",
                    COUNT,
                    Query(gateway("redis_up"), "{{instance}}"),
                    Query(gateway("unusable_keys"), "{{instance}}: unusable keys"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Age of keys",
                    "Time since a gateway last read tenants and keys. Keys revoked since then are still valid there.",
                    SECONDS,
                    Query(gateway("keys_age_seconds"), "{{instance}}"),
                    span=WIDTH // 3,
                ),
                lines(
                    "Failures of background tasks",
                    "Failures in gateways, by task. Each failed task was restarted.",
                    PER_SECOND,
                    Query(total(rate(gateway("background_task_failures_total")), "task"), "{{task}}"),
                    span=WIDTH // 3,
                ),
            ],
        ),
    ],
)
