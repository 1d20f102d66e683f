"""The results as rows of text, for the terminal and the report."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from baton_bench.report import Report

_LATE_MS = 10.0  # above this delay, the client itself may distort the measurement


def figure(value: float) -> str:
    """Return a number with its significant digits only."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def header(report: Report) -> list[str]:
    titles = ["target", "load", "offered req/s", "completed", "failed", "TTFT ms", "ITL ms", "TPOT ms", "E2E ms"]
    return [*titles, "out tok/s", *(["goodput req/s"] if _has_slo(report) else [])]


def rows(report: Report) -> Iterator[list[str]]:
    """Yield a row for each load of each target; times as p50 / p99."""
    for summary in report.summaries:
        yield [
            summary["target"],
            summary["load"],
            figure(summary["offered_req_s"]),
            str(summary["completed"]),
            str(summary["failed"]),
            *(_middle_and_tail(summary[name]) for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")),
            figure(summary["output_tok_s"]),
            *([f"{figure(summary['goodput_req_s'])} ({summary['slo_share']:.0%})"] if _has_slo(report) else []),
        ]


def notes(report: Report) -> Iterator[str]:
    """Yield notes that a reader needs to interpret the table."""
    yield f"seed {report.settings.seed}"
    for target in report.targets:
        if target.dialect.form != "ids":
            yield f"{target.name}: prompts are text of about as many tokens"
        if not target.dialect.exact:
            yield f"{target.name}: takes no ignore_eos; answers may be shorter than asked"
        if not target.by_token:
            yield f"{target.name}: does not count tokens in chunks; ITL is the time between chunks"
    for summary in report.summaries:
        yield from (f"{summary['target']}, {summary['load']}: {note}" for note in _load_notes(summary))


def _load_notes(summary: dict[str, Any]) -> Iterator[str]:
    for what in ("dropped", "clipped"):
        if summary[f"too_long_{what}"]:
            yield f"{summary[f'too_long_{what}']} requests were too long for the model and were {what}"
    if summary["cancelled"]:
        yield f"{summary['cancelled']} requests cancelled by the client"
    if summary["errors"]:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in summary["errors"].items())
        yield f"failed: {kinds} (the first: {summary['error_example']})"
    if summary["turns_not_sent"]:
        yield f"{summary['turns_not_sent']} turns not sent, as the one before had failed"
    late, stalled = summary["client_late_ms"], summary["client_stalled_ms"]
    if late:
        text = f"client sent {figure(late['p50'])} ms late at p50, {figure(late['p99'])} at p99"
        text += f"; its timers were {figure(stalled['p99'])} ms late at p99" if stalled else ""
        slow = late["p99"] > _LATE_MS or (stalled is not None and stalled["p99"] > _LATE_MS)
        yield text + (": this client is too slow for this load" if slow else "")


def console_table(report: Report) -> Table:
    titles = header(report)
    table = Table(title="Times as p50 / p99", title_justify="left", box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in ("target", "load") else "right", no_wrap=True)
    for row in rows(report):
        table.add_row(*row)
    return table


def _middle_and_tail(spread: dict[str, float] | None) -> str:
    return f"{figure(spread['p50'])} / {figure(spread['p99'])}" if spread else "-"


def _has_slo(report: Report) -> bool:
    return report.settings.ttft_slo_ms is not None or report.settings.tpot_slo_ms is not None


def widths(lines: Sequence[Sequence[str]]) -> int:
    """Return the width of a table line in characters."""
    return sum(max(map(len, column)) + 2 for column in zip(*lines, strict=True))
