"""The `baton` command around the services."""

import subprocess
import sys
from importlib.metadata import version

import pytest

pytestmark = pytest.mark.processes


def baton(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "baton_cli", *args], capture_output=True, text=True, timeout=30)


def test_version() -> None:
    assert baton("--version").stdout.strip() == version("baton")


def test_without_arguments_it_lists_its_commands() -> None:
    result = baton()
    assert result.returncode == 0
    for command in ("up", "gateway", "prefill", "decode", "controller", "model"):
        assert f"\n  {command} " in result.stdout


def test_an_unknown_command_is_refused() -> None:
    assert baton("fly").returncode == 2


@pytest.mark.parametrize("service", ["gateway", "prefill", "decode"])
def test_a_service_lists_its_own_flags(service: str) -> None:
    result = baton(service, "--help")
    assert result.returncode == 0
    assert f"usage: baton {service}" in result.stdout
    assert "--served-model-name" in result.stdout
    assert "BATON_SERVED_MODEL_NAME" in result.stdout


@pytest.mark.parametrize("service", ["gateway", "prefill", "decode"])
def test_a_bad_setting_of_a_service_is_one_message(service: str) -> None:
    result = baton(service, "--port", "many")
    assert result.returncode == 2
    assert "--port (or BATON_PORT): Input should be a valid integer" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_flag_of_a_service_is_named() -> None:
    result = baton("gateway", "--no-such-flag")
    assert result.returncode == 2
    assert result.stderr.strip() == "baton: unrecognized arguments: --no-such-flag"
