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

from .models import make_model

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter. Triton reads this when a module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"

MakeModel = Callable[..., Path]

_PODS: Final = "pods"
# Folders whose tests start pods, most of them several processes that share the cores.
WITH_PODS: Final = {"chaos", "cli", "clients", "e2e", "ingress", "loadtest", "prometheus"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the tests to the two processes of `make test`.

    Tests that start pods run one after another in one process, in the order of their folders, since they share pods,
    choose ports and some of them measure time. They come first, as the longest of all groups. The other process
    meanwhile takes the tests of one file after another, and the first one joins it at the end.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _group(item) != _PODS)


def _group(item: pytest.Item) -> str:
    path = item.path.relative_to(Path(__file__).parent)
    return _PODS if path.parts[0] in WITH_PODS else path.as_posix()


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
