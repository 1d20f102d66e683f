"""Which attention backend an engine gets."""

import msgspec
import pytest
import torch

from baton_demo import MODEL_DIR
from baton_engine.attention.select import select_backend
from baton_engine.attention_spec import AttentionSpec
from baton_engine.config import ConfigError
from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import load_model_config

CPU = torch.device("cpu")


def with_attention(spec: AttentionSpec) -> ModelConfig:
    model = load_model_config(MODEL_DIR)
    return msgspec.structs.replace(model, attention=(spec,) * model.num_layers)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_engine.attention.select._why_not_triton", lambda *_: None)


def test_slopes_run_on_a_cpu() -> None:
    assert select_backend("auto", with_attention(AttentionSpec(scale=1.0, alibi=(0.5, 0.25))), CPU) == "torch_sdpa"


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_backend_that_cannot_run_a_model_is_refused_with_those_that_can() -> None:
    capped = with_attention(AttentionSpec(scale=1.0, softcap=50.0))
    with pytest.raises(ConfigError, match=r"'torch_sdpa' cannot run this model here: .*softcap.*; use triton$"):
        select_backend("torch_sdpa", capped, CPU)
    assert select_backend("auto", capped, CPU) == "triton"


def test_a_model_that_no_backend_can_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no attention backend can .*triton: .*CUDA.*torch_sdpa: .*softcap"):
        select_backend("auto", with_attention(AttentionSpec(scale=1.0, softcap=50.0)), CPU)


@pytest.mark.parametrize("name", ["flash", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; use auto or torch_sdpa"):
        select_backend(name, load_model_config(MODEL_DIR), CPU)
