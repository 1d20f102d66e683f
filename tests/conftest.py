"""Fixtures of all tests."""

import os

# The product is tested with as many processes as there are cores, which threads of these would take time from. Before
# numpy is imported, which reads it then.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from .models import make_model

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter. Triton reads this when a module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"

MakeModel = Callable[..., Path]

_PODS: Final = "pods"
# Folders whose tests start pods, most of them several processes that share the cores.
WITH_PODS: Final = {"chaos", "cli", "clients", "e2e", "ingress", "loadtest", "prometheus"}


class _TwoProcesses(LoadScopeScheduling):
    """Deals the tests to the processes of `make test` by groups.

    Tests that start pods run one after another in one process, in the order of their folders, since they share pods,
    choose ports and some of them measure time. They come first, as the longest of all groups. The other process
    meanwhile takes the tests of one file after another, and the first one joins it at the end.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _PODS if _starts_pods(file) else file


def _starts_pods(file: str) -> bool:
    return file.split("/")[1] in WITH_PODS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _TwoProcesses:
    config.option.loadscopereorder = False  # the order of pytest_collection_modifyitems, not that of the groups' sizes
    return _TwoProcesses(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not _starts_pods(item.nodeid))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Return `tiny_model(family, **overrides) -> folder`: as make_model, written once a session for equal arguments."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return make
