"""The report as one self-contained HTML file, without scripts, fonts or network access."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape

from baton_bench.answer import Answer
from baton_bench.chart import Series, line_chart
from baton_bench.load import LoadResult
from baton_bench.pod_watch import PodSample
from baton_bench.report import Report
from baton_bench.summary import percentile, times_of
from baton_bench.table import header, notes, rows

_CDF_POINTS = 200
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1480px; margin: 2em auto; padding: 0 1em; }
h1 { margin-bottom: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: right; padding: .2em .8em; border-bottom: 1px solid #8884; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2), .parameters td { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)); gap: 1em; }
figure { margin: 0; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: currentColor; }
.grid { stroke: #8883; }
polyline { fill: none; stroke-width: 1.8; }
.key span { margin-right: 1.2em; font-weight: 600; }
"""


def html_report(report: Report) -> str:
    """Return the content of the file."""
    names = [target.name for target in report.targets]
    colours = "".join(
        f"polyline.c{i} {{ stroke: {colour}; }} circle.c{i} {{ fill: {colour}; }} span.c{i} {{ color: {colour}; }}\n"
        for i, colour in enumerate(_COLOURS)
    )
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>baton bench serve</title><style>{_STYLE}{colours}</style></head><body>",
        f"<h1>baton bench serve</h1><p>{report.date:%Y-%m-%d %H:%M:%S} UTC</p>",
        _key(names),
        "<h2>Results</h2><p>Times as p50 / p99.</p>",
        _table([header(report), *rows(report)]),
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes(report)) + "</ul>",
        *_rate_charts(report, names),
    ]
    for load in dict.fromkeys(result.plan.name for result in report.results):
        results = [result for result in report.results if result.plan.name == load]
        parts += [f"<h2>{escape(load)}</h2>", _key(names), _charts(_load_figures(results, names))]
    parts += ["<h2>Parameters</h2>", _parameters(report), "</body></html>\n"]
    return "".join(parts)


def _key(names: Sequence[str]) -> str:
    spans = (f'<span class="c{_colour(i)}">— {escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="key">{"".join(spans)}</p>'


def _colour(number: int) -> int:
    return number % len(_COLOURS)


def _table(lines: Sequence[Sequence[str]]) -> str:
    first, *others = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines)
    body = "".join(f"<tr>{line}</tr>" for line in others)
    return f'<div class="scroll"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def _parameters(report: Report) -> str:
    found = report.json()
    lines = [*found["parameters"].items(), *found["client"].items(), ("baton", found["baton"])]
    lines += [(f"target {target.name}", f"{target.url} {target.dialect}") for target in report.targets]
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in lines)
    return f'<div class="scroll"><table class="parameters"><tbody>{cells}</tbody></table></div>'


def _charts(figures: Iterator[tuple[str, str, str]]) -> str:
    return '<div class="charts">' + "".join(_figure(*figure) for figure in figures) + "</div>"


def _figure(kind: str, caption: str, svg: str) -> str:
    return f'<figure class="{kind}"><figcaption>{escape(caption)}</figcaption>{svg}</figure>'


def _rate_charts(report: Report, names: Sequence[str]) -> Iterator[str]:
    """Yield the charts over the offered rate, if there were several rates."""
    if len({result.plan.name for result in report.results}) < 2:
        return
    summaries = report.summaries
    charts = [("req_s", "throughput", "Throughput by offered rate", "completed req/s")]
    if any("goodput_req_s" in summary for summary in summaries):
        charts.insert(0, ("goodput_req_s", "goodput", "Goodput by offered rate", "req/s within the SLO"))
    figures = []
    for field, kind, caption, label in charts:
        series = [
            Series(
                name,
                sorted((row["offered_req_s"], row[field]) for row in summaries if row["target"] == name),
                _colour(number),
            )
            for number, name in enumerate(names)
        ]
        figures.append((kind, caption, line_chart(series, "offered req/s", label)))
    yield _charts(iter(figures))


def _load_figures(results: Sequence[LoadResult], names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield class, caption and chart of each figure of a load."""
    colours = {name: _colour(number) for number, name in enumerate(names)}
    times = {result.target: times_of(result.answers) for result in results}
    for field, title in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "E2E")):
        series = [Series(name, _cdf(values[field]), colours[name]) for name, values in times.items()]
        chart = line_chart(
            series, f"{title} in ms", "share of " + ("tokens" if title == "ITL" else "requests"), True, 1
        )
        yield f"{title.lower()}-cdf", f"{title}, cumulative", chart
    in_flight = [Series(result.target, _in_flight(result.answers), colours[result.target]) for result in results]
    yield "in-flight", "Requests in flight", line_chart(in_flight, "seconds", "requests")
    watched = [result for result in results if result.pods]
    if not watched:
        return
    queued = [_over_time(result, colours, lambda sample: sample.queued_tokens) for result in watched]
    yield "queue", "Prompt tokens waiting for prefill", line_chart(queued, "seconds", "tokens")
    batch = [_over_time(result, colours, lambda sample: sample.requests) for result in watched]
    yield "batch", "Requests on decode pods", line_chart(batch, "seconds", "requests")
    for role in sorted({role for result in watched for sample in result.pods for role in sample.kv}):
        kv = [_over_time(result, colours, partial(_kv_share, role)) for result in watched]
        yield f"kv kv-{role}", f"KV blocks held, {role} pods", line_chart(kv, "seconds", "share of blocks", top=1)


def _cdf(ordered: Sequence[float]) -> list[tuple[float, float]]:
    if not ordered:
        return []
    return [(percentile(ordered, 100 * i / _CDF_POINTS), i / _CDF_POINTS) for i in range(_CDF_POINTS + 1)]


def _in_flight(answers: Sequence[Answer]) -> list[tuple[float, float]]:
    changes = sorted([(answer.sent, 1) for answer in answers] + [(answer.end, -1) for answer in answers])
    points, running = [(0.0, 0.0)], 0
    for at, change in changes:
        points.append((at, running))
        running += change
        points.append((at, running))
    return points


def _kv_share(role: str, sample: PodSample) -> float:
    return sample.kv.get(role, 0.0)


def _over_time(result: LoadResult, colours: dict[str, int], value: Callable[[PodSample], float]) -> Series:
    return Series(result.target, [(sample.at, value(sample)) for sample in result.pods], colours[result.target])
