"""Fixtures of all tests."""

import os

# The product is tested with as many processes as there are cores, which threads of these would take time from. Before
# numpy is imported, which reads it then.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from .models import make_model

if TYPE_CHECKING:
    from .groups import Groups

pytest_plugins = ["tests.markers"]

torch.set_num_threads(1)

# How long an example takes says more about what else runs on the machine than about the code under test.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter. Triton reads this when a module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"

MakeModel = Callable[..., Path]


# A run in one process needs no xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "Groups":
    from .groups import Groups

    config.option.loadscopereorder = False  # which would order the groups by their number of tests
    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # in a process of xdist
        from .groups import longest_first

        longest_first(items)


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what tests, and the processes that they start, cache for the user out of the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user_cache")))
        yield


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
