"""The start of a process by `python -m baton_common.start`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_MODULE = """
import gc, json, sys
on_import = gc.isenabled()
def main():
    print(json.dumps({"argv": sys.argv, "on": [on_import, gc.isenabled()], "frozen": gc.get_freeze_count() > 0}))
"""


@pytest.mark.processes
def test_the_collector_is_off_until_all_is_imported(tmp_path: Path) -> None:
    (tmp_path / "started.py").write_text(_MODULE)
    done = subprocess.run(
        [sys.executable, "-m", "baton_common.start", "started", "3", "--flag"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout) == {"argv": ["started", "3", "--flag"], "on": [False, True], "frozen": True}
