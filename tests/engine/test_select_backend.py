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


def test_slopes_caps_and_sinks_run_on_a_cpu() -> None:
    for spec in (
        AttentionSpec(scale=1.0, alibi=(0.5, 0.25)),
        AttentionSpec(scale=1.0, softcap=50.0),
        AttentionSpec(scale=1.0, sinks=True),
    ):
        assert select_backend("auto", with_attention(spec), CPU) == "torch_sdpa"


def test_a_backend_that_cannot_run_a_model_is_refused_with_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    wide = msgspec.structs.replace(load_model_config(MODEL_DIR), head_dim=512)
    gpu = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"'triton' cannot run this model here: heads of 512 .*; use torch_sdpa$"):
        select_backend("triton", wide, gpu)
    assert select_backend("auto", wide, gpu) == "torch_sdpa"
    with pytest.raises(ConfigError, match=r"no attention backend can .*triton: heads of 512.*torch_sdpa: --determ"):
        select_backend("auto", wide, gpu, deterministic=True)


@pytest.mark.parametrize("name", ["flash", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; use auto or torch_sdpa"):
        select_backend(name, load_model_config(MODEL_DIR), CPU)
