"""Results of the engine benchmark as text."""

from loadtest.common.bench_table import aligned, figure, spread
from loadtest.common.job import Json
from loadtest.engine.rows import times_better


def table(entry: Json, engines: list[str]) -> str:
    """Return the rows of a shape: each engine, how much better ours is, the limit, and how near ours comes."""
    others = [engine for engine in engines if engine != "ours"] if "ours" in engines else []
    lines = [["", "unit", *engines, *(f"ours : {other}" for other in others), "limit", "% of limit"]]
    for row in entry["rows"].values():
        cells = [row["name"], row["unit"]]
        for engine in engines:
            result = row.get(engine, {})
            failed = "error" in result or (not result and engine in entry["errors"])
            cells.append(spread(result["samples"]) if "median" in result else "failed" if failed else "-")
        cells += [f"{row['ratio'][o]:.2f}" if o in row.get("ratio", {}) else "-" for o in others]
        ours = row.get("ours", {}).get("median")
        near = "-" if ours is None else f"{times_better(row['unit'], ours, row['limit']):.0%}"
        lines.append([*cells, figure(row["limit"]), near])
    errors = [f"{name} failed: {error}" for name, error in entry["errors"].items()]
    return "\n".join([aligned(lines, 2), *errors])


def profile_table(report: Json) -> str:
    """Return the table of how the time of a step is spent, as step_profile reports it."""
    wall, busy = report["wall_ms"], report["busy_ms"]
    lines = [["group", "ms", "% of wall", "kernels", "limit ms", "% of limit"]]
    for group, part in sorted(report["groups"].items(), key=lambda item: -item[1]["ms"]):
        limit = part["limit_ms"]
        cells = [group, f"{part['ms']:.3f}", f"{part['ms'] / wall:.0%}", f"{part['kernels']:.0f}"]
        lines.append([*cells, *(("-", "-") if limit is None else (f"{limit:.3f}", f"{limit / part['ms']:.0%}"))])
    title = f"{report['name']}: {wall:.3f} ms, device busy {busy:.3f} ms ({busy / wall:.0%})"
    return f"{title}\n{aligned(lines, 1)}\n"
