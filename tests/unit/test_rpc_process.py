"""The process of a worker that serves RPCs starts fast and stays small, because it has no torch."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("service", ["baton_decode", "baton_prefill", "baton_gateway", "baton_controller"])
def test_it_never_imports_torch(service: str) -> None:
    code = f"import sys, {service}.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
