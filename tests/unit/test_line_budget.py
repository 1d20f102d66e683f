"""`.ci/line_budget.py`, which `make check` runs."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "line_budget.py"


def run(folder: Path, budgets: str) -> int:
    """Run a copy of it in a project of two packages: `gateway` of three lines, and `tests` of one."""
    files = {
        ".ci/line_budget.py": SCRIPT.read_text(),
        "pyproject.toml": f"[tool.baton.line-budget]\n{budgets}",
        "services/gateway/__init__.py": "",
        "services/gateway/http/server.py": "a\n\nb",
        "services/gateway/api_pb2.py": "generated\n" * 100,
        "services/gateway/notes.txt": "text\n" * 100,
        "shared/no_package/code.py": "a\n" * 100,
        "tests/test_a.py": "a\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("kernels", "loadtest"):
        (folder / name).mkdir()
    return int(runpy.run_path(str(folder / ".ci" / "line_budget.py"))["main"]())


def test_every_package_is_printed_beside_its_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "gateway = 3\ntests = 9\n") == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert rows[1:] == [["gateway", "3", "3", "0"], ["loadtest", "0", "0", "0"], ["tests", "1", "9", "8"]]
    assert err == ""


@pytest.mark.parametrize(
    ("budgets", "problem"),
    [
        ("gateway = 2\ntests = 9\n", "gateway has 3 lines and a budget of 2: make it smaller, split it, or raise"),
        ("tests = 9\n", "gateway has 3 lines and a budget of 0"),
        ("gateway = 3\ntests = 9\nengine = 5\n", "engine has a line budget, but there is no such package"),
    ],
)
def test_what_does_not_fit_fails_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], budgets: str, problem: str
) -> None:
    assert run(tmp_path, budgets) == 1
    assert problem in capsys.readouterr().err
