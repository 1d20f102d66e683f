"""Draws the results of a replayed trace under each policy: TTFT as cumulative distributions, and hit rates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
QUANTILES = 150  # points of a curve
WIDTH, HEIGHT = 900, 360
TOP, BOTTOM = 40, 310
CURVES = (60, 540)  # left and right of the panels
BARS = (690, 850)


@dataclass(frozen=True)
class Curve:
    """The results of one policy. ttft: seconds, one for each request; hit_rate: the cached share of prompt tokens."""

    ttft: Sequence[float]
    hit_rate: float


def plot(curves: Mapping[str, Curve]) -> str:
    """Return the SVG. Raises ValueError when a curve has no requests."""
    if not all(curve.ttft for curve in curves.values()):
        raise ValueError("a curve without requests cannot be drawn")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_distributions(curves),
        *_hit_rates(curves),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _distributions(curves: Mapping[str, Curve]) -> list[str]:
    points = {name: _quantiles(curve.ttft) for name, curve in curves.items()}
    seconds = [value for quantiles in points.values() for value, _ in quantiles]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    left, right = CURVES

    def x_of(value: float) -> float:
        return left + (right - left) * (math.log10(value) - low) / max(high - low, 1)

    lines = [_text((left + right) / 2, 20, "TTFT: share of requests within", "middle")]
    for exponent in range(low, high + 1):
        x = x_of(10.0**exponent)
        lines += [_line(x, TOP, x, BOTTOM), _text(x, BOTTOM + 20, _duration(exponent), "middle")]
    for percent in (0, 25, 50, 75, 100):
        y = _height(percent / 100)
        lines += [_line(left, y, right, y), _text(left - 8, y + 4, f"{percent} %", "end")]
    for quantiles, colour in zip(points.values(), COLOURS, strict=False):
        path = " ".join(f"{x_of(value):.1f},{_height(share):.1f}" for value, share in quantiles)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return lines


def _hit_rates(curves: Mapping[str, Curve]) -> list[str]:
    left, right = BARS
    # A run without a hit has bars of no width.
    most = max(curve.hit_rate for curve in curves.values()) or 1
    lines = [_text((left + right) / 2, 20, "Hit rate of prompt tokens", "middle")]
    for number, ((name, curve), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        y, width = TOP + 20 + 55 * number, (right - left) * curve.hit_rate / most
        lines += [
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="30" fill="{colour}"/>',
            _text(left - 8, y + 19, name, "end"),
            _text(left + width + 4, y + 19, f"{curve.hit_rate * 100:.1f} %", "start"),
        ]
    return lines


def _quantiles(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (value, share of values up to it), thinned out; zero is shown as 1 ms."""
    ordered = sorted(max(value, 1e-3) for value in values)
    count = min(QUANTILES, len(ordered))
    ranks = [-(-len(ordered) * step // count) for step in range(1, count + 1)]
    return [(ordered[rank - 1], rank / len(ordered)) for rank in ranks]


def _height(share: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * share


def _duration(exponent: int) -> str:
    return f"{10**exponent} s" if exponent >= 0 else f"{10 ** (exponent + 3)} ms"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ccc"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
