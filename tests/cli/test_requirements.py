"""Old versions of packages are named before a service fails at something that they do not have."""

from importlib.metadata import PackageNotFoundError

import pytest

from baton_cli import requirements
from baton_cli.errors import UserError
from baton_cli.requirements import check_versions

NEEDED = [
    "grpcio>=1.85.1",
    'uvicorn[standard]<0.55,>=0.53; extra == "gateway"',
    'torch<2.14,>=2.11; extra == "worker"',
    'triton>=3.6; extra == "gpu"',
]


def pretend(patch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    patch.setattr(requirements, "requires", lambda _: NEEDED)
    patch.setattr(requirements, "version", version)


def test_a_version_below_the_floor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, grpcio="1.85.0", torch="2.11.0+cu130")
    with pytest.raises(
        UserError, match=r"^grpcio 1\.85\.0 is installed, but Baton needs grpcio>=1\.85\.1: pip install"
    ):
        check_versions("worker")


def test_only_what_the_service_needs_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, grpcio="1.86", torch="2.10.1", uvicorn="0.53.0")
    check_versions("gateway")
    with pytest.raises(UserError, match=r"pip install 'torch<2\.14,>=2\.11'$"):
        check_versions("worker", "gpu")


def test_what_is_new_enough_or_missing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, grpcio="1.90.0rc1", torch="2.14.0a0+git1")
    check_versions("worker")
    check_versions("gateway")


def test_the_versions_here_are_new_enough() -> None:
    check_versions("bench", "controller", "gateway", "worker", "gpu")
