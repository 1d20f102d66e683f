"""Prints how many lines of Python each package has, and fails if one has more than its budget in pyproject.toml.

Generated code does not count. A package that outgrows its budget is made smaller, split, or given a larger budget,
which is one line of a change that every reviewer sees.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def packages() -> dict[str, Path]:
    """Return the folder of everything that has a budget, by its name in pyproject.toml."""
    shipped = [folder for kind in ("services", "shared", "kernels") for folder in (ROOT / kind).iterdir()]
    found = {folder.name: folder for folder in shipped if (folder / "__init__.py").exists()}
    return {**dict(sorted(found.items())), "loadtest": ROOT / "loadtest", "tests": ROOT / "tests"}


def lines_of(folder: Path) -> int:
    files = (file for file in folder.rglob("*.py") if not file.stem.endswith(("_pb2", "_pb2_grpc")))
    return sum(len(file.read_bytes().splitlines()) for file in files)


def main() -> int:
    """Return the exit code."""
    budgets: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["baton"]["line-budget"]
    lines = {name: lines_of(folder) for name, folder in packages().items()}
    print(f"{'package':<18}{'lines':>7}{'budget':>8}{'left':>7}")
    for name, count in lines.items():
        budget = budgets.get(name, 0)
        print(f"{name:<18}{count:>7}{budget:>8}{budget - count:>7}{'  <- over' if count > budget else ''}")
    problems = [
        f"{name} has {count} lines and a budget of {budgets.get(name, 0)}: make it smaller, split it, or raise "
        f"`{name}` under [tool.baton.line-budget] in pyproject.toml"
        for name, count in lines.items()
        if count > budgets.get(name, 0)
    ]
    problems += [f"{name} has a line budget, but there is no such package" for name in budgets if name not in lines]
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
