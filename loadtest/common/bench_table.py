"""Numbers and tables of benchmarks as text."""

import statistics


def figure(value: float) -> str:
    """Return a number with its significant digits only."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def spread(values: list[float]) -> str:
    """Return the median of some values, and the least and the largest if there are several."""
    median = figure(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({figure(min(values))}-{figure(max(values))})"


def aligned(lines: list[list[str]], left: int) -> str:
    """Return columns as wide as their longest cell; the first `left` of them are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
