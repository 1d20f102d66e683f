"""The hand-over of KV from prefill to decode pods."""

from .board import Board
from .panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    QUANTILES,
    SECONDS,
    SHARE,
    TOKENS,
    WIDTH,
    Query,
    heatmap_panel,
    lines,
    number,
)
from .queries import of_model, quantile, rate, share, total, worker

_EXPOSED = rate(worker("handover_exposed_seconds_bucket"))
_PREFILLS = rate(of_model("prefills_total"))
_BY_PREFILL = 'by="prefill"'
_ELSEWHERE = total(rate(of_model("prefills_total", _BY_PREFILL)))
_FAILED = total(rate(worker("handover_events_total", 'event="failed"')))


def _total(name: str, *by: str) -> str:
    return total(rate(worker(f"handover_{name}_total")), *by)


HANDOVER = Board(
    "handover",
    "Hand-over",
    "The transfer of KV from prefill to decode pods, the latency that it adds, and its failures.",
    rows=[
        (
            "Now",
            [
                number(
                    "Disaggregated",
                    "Share of prompts that prefill pods computed. Decode pods compute short or cached ones by design.",
                    SHARE,
                    share(_ELSEWHERE, total(_PREFILLS)),
                ),
                number("KV", "Bytes that arrived on decode pods.", BYTES, _total("bytes")),
                number("KV in tokens", "Tokens whose KV arrived.", TOKENS, _total("tokens")),
                number(
                    "Exposed p95",
                    "Time from a prompt's first token until all of its KV has arrived.",
                    SECONDS,
                    quantile(0.95, _EXPOSED),
                ),
                number("Open tickets", "Hand-overs in progress.", COUNT, total(worker("open_tickets"))),
                number(
                    "Pinned blocks",
                    "Blocks on prefill pods that decode pods have not fetched yet.",
                    COUNT,
                    total(worker("pinned_blocks")),
                ),
            ],
        ),
        (
            "Volume",
            [
                lines(
                    "Prompts by who computed them",
                    "Whether prefill pods or decode pods computed them.",
                    PER_SECOND,
                    Query(total(_PREFILLS, "by"), "{{by}}"),
                    stacked=True,
                    span=WIDTH // 3,
                ),
                lines(
                    "KV by way",
                    "gpu: directly from GPU to GPU. host: through the hosts' memory, over TCP or gRPC.",
                    BYTES,
                    Query(_total("bytes", "way"), "{{way}}"),
                    stacked=True,
                    span=WIDTH // 3,
                ),
                lines(
                    "Pieces by way",
                    "A prompt's KV is sent in pieces, each with a checksum.",
                    PER_SECOND,
                    Query(_total("pieces", "way"), "{{way}}"),
                    stacked=True,
                    span=WIDTH // 3,
                ),
            ],
        ),
        (
            "Added latency",
            [
                lines(
                    "Exposed time",
                    "From a prompt's first token until all of its KV has arrived: the delay that the hand-over adds "
                    "before the second token.",
                    SECONDS,
                    *(Query(quantile(q, _EXPOSED), f"p{q * 100:g}") for q in QUANTILES),
                ),
                heatmap_panel("Exposed time", "Number of hand-overs by exposed time.", SECONDS, total(_EXPOSED, "le")),
            ],
        ),
        (
            "Failures and held resources",
            [
                lines(
                    "Failures by reason",
                    "failed: another prefill pod or the decode pod computed the prompt instead. lease_expired: no "
                    "decode pod fetched the KV in time. timeout: the remaining KV did not arrive. refused_…: a piece "
                    "did not match its ticket; refused_stale is normal after a cancel.",
                    PER_SECOND,
                    Query(_total("events", "event"), "{{event}}"),
                ),
                lines(
                    "Refused peers",
                    "Calls and bulk connections of callers that failed to authenticate as pods of this release. grpc "
                    "and bulk are the two ports.",
                    PER_SECOND,
                    Query(total(rate(worker("peer_refusals_total")), "port"), "{{port}}"),
                ),
                lines(
                    "Share of hand-overs that failed",
                    "Failed hand-overs divided by all hand-overs that began.",
                    SHARE,
                    Query(
                        share(
                            _FAILED,
                            f"({total(rate(worker('prefills_total', _BY_PREFILL)))} + {_FAILED})",
                        )
                    ),
                ),
                lines(
                    "Open tickets",
                    "Hand-overs in progress. Both the prefill pod and the decode pod count each one.",
                    COUNT,
                    Query(worker("open_tickets"), "{{instance}}"),
                ),
                lines(
                    "Pinned blocks",
                    "Blocks on prefill pods that stay until decode pods have fetched them or the lease ends.",
                    COUNT,
                    Query(worker("pinned_blocks"), "{{instance}}"),
                ),
            ],
        ),
    ],
    by_revision=True,
)
