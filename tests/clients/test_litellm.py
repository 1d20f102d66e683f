"""litellm, in an environment of its own, because it needs an older openai than Baton's tests."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = "tests/clients/apart/test_litellm.py"


def test_litellm() -> None:
    command = [ROOT / ".venv-litellm/bin/python", "-m", "pytest", "-q", "--confcutdir=tests/clients/apart", TESTS]
    baton = Path(sys.executable).with_name("baton")
    done = subprocess.run([*command, "--baton", baton], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
