"""The device that a name stands for."""

import pytest
import torch

from baton_engine.config import ConfigError
from baton_engine.device import find_device


@pytest.mark.parametrize(
    ("name", "device"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3"), ("cpu", "cpu")]
)
def test_a_gpu_has_its_index(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the hand-over makes the device its current one, which torch refuses without an index."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device(name) == torch.device(device)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        find_device("cuda")


def test_an_unknown_device() -> None:
    with pytest.raises(ConfigError, match="'gpu' is unknown"):
        find_device("gpu")
