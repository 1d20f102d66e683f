"""Fixtures of the tests with a real Prometheus."""

from pathlib import Path

import pytest

from tests.debian import NoProgramError, find_program

CHART = Path(__file__).parents[2] / "helm" / "baton"
RULES = CHART / "rules"


def _program(name: str, config: pytest.Config) -> Path:
    assert config.cache is not None
    try:
        return find_program(name, "prometheus", config.cache.mkdir("prometheus"))
    except NoProgramError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def promtool(pytestconfig: pytest.Config) -> Path:
    return _program("promtool", pytestconfig)


@pytest.fixture(scope="session")
def program(pytestconfig: pytest.Config) -> Path:
    return _program("prometheus", pytestconfig)
