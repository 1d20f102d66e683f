"""Draws the number of pods over time."""

from collections.abc import Sequence

_COLOURS = ("#1b6ca8", "#c8553d", "#5b8c5a", "#8a6fb0", "#b08900", "#555555")
_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 200, 40, 24


def plot(runs: dict[str, Sequence[tuple[float, int, int]]]) -> str:
    """Return an SVG image with a panel for prefill and one for decode, and a line for each run.

    runs: time, prefill and decode pods of each evaluation.
    """
    until = max(time for samples in runs.values() for time, _, _ in samples) or 1.0
    most = max(max(prefill, decode) for samples in runs.values() for _, prefill, decode in samples)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 200}" height="{2 * (_HEIGHT + 3 * _TOP)}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for role, panel in enumerate(("prefill", "decode")):
        top = _TOP + role * (_HEIGHT + 2 * _TOP)
        parts.append(f'<text x="{_LEFT}" y="{top - 8}">live {panel} pods, over {until / 60:.0f} minutes</text>')
        for count in range(0, most + 1, max(most // 4, 1)):
            y = top + _HEIGHT * (1 - count / most)
            parts.append(
                f'<path d="M{_LEFT} {y:.0f}h{_WIDTH}" stroke="#ddd"/><text x="8" y="{y + 4:.0f}">{count}</text>'
            )
        for samples, colour in zip(runs.values(), _colours(len(runs)), strict=True):
            line = _steps([(time / until, sizes[role] / most) for time, *sizes in samples], top)
            parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for number, (name, colour) in enumerate(zip(runs, _colours(len(runs)), strict=True)):
        y = _TOP + 20 * number
        parts.append(f'<text x="{_LEFT + _WIDTH + 16}" y="{y + 10}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _steps(points: Sequence[tuple[float, float]], top: int) -> str:
    x, y = points[0]
    line = f"M{_LEFT + x * _WIDTH:.1f} {top + _HEIGHT * (1 - y):.1f}"
    for x, y in points[1:]:
        line += f"H{_LEFT + x * _WIDTH:.1f}V{top + _HEIGHT * (1 - y):.1f}"
    return line
