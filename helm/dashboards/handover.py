"""The hand-over of KV from prefill to decode pods."""

from .board import Board
from .panels import BYTES, COUNT, PER_SECOND, QUANTILES, SECONDS, SHARE, TOKENS, WIDTH, Query, heat, lines, number
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
    "How KV gets from prefill to decode pods, what of it shows in the time to answer, and what fails.",
    rows=[
        (
            "Now",
            [
                number(
                    "Disaggregated",
                    "Share of prompts that prefill pods computed. Decode pods compute short or cached ones on purpose.",
                    SHARE,
                    share(_ELSEWHERE, total(_PREFILLS)),
                ),
                number("KV", "Bytes that arrived on decode pods.", BYTES, _total("bytes")),
                number("KV in tokens", "Tokens whose KV arrived.", TOKENS, _total("tokens")),
                number(
                    "Exposed p95",
                    "Time that a first token was there and its KV was not.",
                    SECONDS,
                    quantile(0.95, _EXPOSED),
                ),
                number("Open tickets", "Hand-overs under way.", COUNT, total(worker("open_tickets"))),
                number(
                    "Pinned blocks", "That wait on prefill pods to be taken.", COUNT, total(worker("pinned_blocks"))
                ),
            ],
        ),
        (
            "How much",
            [
                lines(
                    "Prompts by who computed them",
                    "Prefill pods, or decode pods by themselves.",
                    PER_SECOND,
                    Query(total(_PREFILLS, "by"), "{{by}}"),
                    stacked=True,
                    span=WIDTH // 3,
                ),
                lines(
                    "KV by way",
                    "gpu: from GPU to GPU. host: over TCP or gRPC, through the hosts' memory.",
                    BYTES,
                    Query(_total("bytes", "way"), "{{way}}"),
                    stacked=True,
                    span=WIDTH // 3,
                ),
                lines(
                    "Pieces by way",
                    "A prompt's KV comes in pieces, each with a checksum.",
                    PER_SECOND,
                    Query(_total("pieces", "way"), "{{way}}"),
                    stacked=True,
                    span=WIDTH // 3,
                ),
            ],
        ),
        (
            "What of it shows",
            [
                lines(
                    "Exposed time",
                    "From the first token of a prompt until all of its KV was there: what the hand-over adds before "
                    "the second token.",
                    SECONDS,
                    *(Query(quantile(q, _EXPOSED), f"p{q * 100:g}") for q in QUANTILES),
                ),
                heat("Exposed time", "How many hand-overs took so long.", SECONDS, total(_EXPOSED, "le")),
            ],
        ),
        (
            "What is held, and what fails",
            [
                lines(
                    "Failures by reason",
                    "failed: went to the next prefill pod, or the decode pod computed the prompt. lease_expired: "
                    "nobody took the KV in time. timeout: the rest of it did not come. refused_…: a piece was not what "
                    "was ordered; refused_stale is what a cancel leaves.",
                    PER_SECOND,
                    Query(_total("events", "event"), "{{event}}"),
                ),
                lines(
                    "Refused peers",
                    "Calls and bulk connections by callers that did not show that they are pods of this release. grpc "
                    "and bulk are the two ports.",
                    PER_SECOND,
                    Query(total(rate(worker("peer_refusals_total")), "port"), "{{port}}"),
                ),
                lines(
                    "Share of hand-overs that failed",
                    "Of those that were begun.",
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
                    "Hand-overs under way, on both of their ends.",
                    COUNT,
                    Query(worker("open_tickets"), "{{instance}}"),
                ),
                lines(
                    "Pinned blocks",
                    "On prefill pods, until decode pods have them or the lease ends.",
                    COUNT,
                    Query(worker("pinned_blocks"), "{{instance}}"),
                ),
            ],
        ),
    ],
    by_revision=True,
)
