"""Line charts as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 460, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 44


@dataclass(frozen=True)
class Series:
    """points: (x, y) in order of x. colour: number of a colour of the report's style sheet."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


@dataclass(frozen=True)
class _Scale:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        value = math.log10(max(value, self.low)) if self.log else value
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _round_step((self.high - self.low) / 5)
            return [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        digits = (1,) if self.high / self.low > 1e4 else (1, 2, 5)
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        ticks = [digit * 10.0**exponent for exponent in exponents for digit in digits]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def line_chart(series: Sequence[Series], x_label: str, y_label: str, log_x: bool = False, top: float = 0.0) -> str:
    """Return an <svg> of these series. top: the y axis ends at this value or higher."""
    points = [point for one in series for point in one.points if not log_x or point[0] > 0]
    x = _x_scale([point[0] for point in points] or [1.0], log_x)
    y = _Scale(0, max(top, *(point[1] for point in points), 1e-9) if points else top or 1, _HEIGHT - _BOTTOM, _TOP)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_label)} by {escape(x_label)}">']
    for tick in y.ticks():
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x.ticks():
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
    )
    for one in series:
        shown = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in one.points if not log_x or a > 0)
        title = f"<title>{escape(one.name)}</title>"
        parts.append(f'<polyline class="c{one.colour}" points="{shown}">{title}</polyline>')
        if len(one.points) <= 12:
            parts += [f'<circle class="c{one.colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b in one.points]
    return "".join([*parts, "</svg>"])


def _x_scale(values: Sequence[float], log: bool) -> _Scale:
    low, high = min(values), max(values)
    if log:
        low, high = low * 0.9, high * 1.1
    else:
        low = 0.0
        high = high or 1.0
    return _Scale(low, high, _LEFT, _WIDTH - _RIGHT, log)


def _round_step(step: float) -> float:
    """Return the next of 1, 2, 5, 10, …"""
    unit = 10.0 ** math.floor(math.log10(step))
    return next(digit * unit for digit in (1, 2, 5, 10) if digit * unit >= step * 0.999)
