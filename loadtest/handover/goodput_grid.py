"""Goodput over the offered rate: the requests that servers answer within a promise (SLO), for a grid of promises.

Usage: goodput_grid.py RESULT.json... [--ttft MS...] [--tpot MS...] [--svg FILE]. The files are those of `baton bench
serve --json-file`; loads of the same name in several of them count as one. A request is good if its first token came
within the one time and its mean time per token after that was within the other.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[2]))

from baton_bench.chart import Series, line_chart
from loadtest.common.job import Json

_COLOURS = ("#1b6ca8", "#c8553d", "#5b8c5a", "#8a6fb0")
_WIDTH, _HEIGHT, _TITLE = 460, 270, 24


class Promise(NamedTuple):
    """The limits of TTFT and of the mean time per later token, in milliseconds."""

    ttft: float
    tpot: float

    def kept(self, request: Json) -> bool:
        if request["outcome"] != "completed":
            return False
        return bool(request["ttft"] * 1e3 <= self.ttft and (request["tpot"] or 0.0) * 1e3 <= self.tpot)

    def __str__(self) -> str:
        return f"{self.ttft:g} ms, {self.tpot:g} ms"


class Point(NamedTuple):
    """A load of a target: offered requests a second, and the share of good requests for each promise."""

    offered: float
    shares: dict[Promise, float]


def curves(reports: Iterable[Json], promises: Sequence[Promise]) -> dict[str, list[Point]]:
    """Return the points of each target by offered rate."""
    requests: dict[tuple[str, str], list[Json]] = defaultdict(list)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for report in reports:
        for result in report["results"]:
            key = result["target"], result["load"]
            requests[key] += result["requests_sent"]
            rates[key].append(result["offered_req_s"])
    found: dict[str, list[Point]] = defaultdict(list)
    for key, sent in requests.items():
        shares = {promise: sum(map(promise.kept, sent)) / len(sent) for promise in promises}
        found[key[0]].append(Point(statistics.mean(rates[key]), shares))
    return {target: sorted(points, key=lambda point: point.offered) for target, points in found.items()}


def table(found: dict[str, list[Point]], promises: Sequence[Promise]) -> str:
    """Return Markdown: a row for each promise, a column for each load, in a cell the share of each target."""
    loads = list(zip(*found.values(), strict=True))
    lines = [[" / ".join(found), *(f"{points[0].offered:.1f}/s" for points in loads)], ["---"] * (len(loads) + 1)]
    for promise in promises:
        cells = [" / ".join(f"{point.shares[promise]:.0%}" for point in points) for points in loads]
        lines.append([str(promise), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(found: dict[str, list[Point]], promises: Sequence[Promise]) -> str:
    """Return an SVG image with a panel for each promise: good requests a second over offered requests a second."""
    columns = len({promise.tpot for promise in promises})
    rows = -(-len(promises) // columns)
    width, height = columns * _WIDTH, rows * (_HEIGHT + _TITLE) + _TITLE
    style = "text{font:12px sans-serif}.grid{stroke:#ddd}polyline{fill:none;stroke-width:2}" + "".join(
        f"polyline.c{number}{{stroke:{colour}}}circle.c{number}{{fill:{colour}}}"
        for number, colour in enumerate(_COLOURS)
    )
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{style}</style>']
    for number, target in enumerate(found):
        parts.append(f'<text x="{60 + 160 * number}" y="16" fill="{_COLOURS[number]}">{escape(target)}</text>')
    for number, promise in enumerate(promises):
        left, top = number % columns * _WIDTH, number // columns * (_HEIGHT + _TITLE) + _TITLE
        series = [
            Series(target, [(point.offered, point.offered * point.shares[promise]) for point in points], colour)
            for colour, (target, points) in enumerate(found.items())
        ]
        most = max(point.offered for points in found.values() for point in points)
        chart = line_chart(series, "requests/s offered", "within the promise", top=most)
        place = f'<svg x="{left}" y="{top + _TITLE}" width="{_WIDTH}" height="{_HEIGHT}"'
        parts.append(
            f'<text x="{left + 56}" y="{top + 18}">first token {promise.ttft:g} ms, then {promise.tpot:g} ms</text>'
        )
        parts.append(chart.replace("<svg", place, 1))
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--ttft", type=float, nargs="+", default=[200.0, 400.0, 800.0], metavar="MS")
    parser.add_argument("--tpot", type=float, nargs="+", default=[10.0, 20.0, 40.0], metavar="MS")
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    promises = [Promise(*pair) for pair in itertools.product(arguments.ttft, arguments.tpot)]
    found = curves((json.loads(path.read_text()) for path in arguments.results), promises)
    print(table(found, promises))
    if arguments.svg:
        arguments.svg.write_text(plot(found, promises))


if __name__ == "__main__":
    main()
