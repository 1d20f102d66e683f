"""Which attention backend an engine gets."""

import msgspec
import pytest
import torch

from baton_demo import MODEL_DIR
from baton_engine.attention.select import select_backend
from baton_engine.attention_spec import AttentionSpec, KeyBlockSpec
from baton_engine.config import ConfigError
from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import load_model_config, parse_model_config

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
    capability = (8, 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    wide = msgspec.structs.replace(load_model_config(MODEL_DIR), head_dim=512)
    gpu = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"'triton' cannot run this model here: heads of 512 .*; use torch_sdpa$"):
        select_backend("triton", wide, gpu)
    assert select_backend("auto", wide, gpu) == "torch_sdpa"
    with pytest.raises(ConfigError, match=r"no attention backend can .*triton: heads of 512.*torch_sdpa: --determ"):
        select_backend("auto", wide, gpu, deterministic=True)
    # Newer GPUs have more shared memory.
    capability = (9, 0)
    assert select_backend("auto", wide, gpu) == "triton"


@pytest.mark.parametrize("name", ["flash", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; use auto or torch_sdpa"):
        select_backend(name, load_model_config(MODEL_DIR), CPU)


def test_hopper_has_its_own_kernel_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = load_model_config(MODEL_DIR), torch.device("cuda")
    sloped = with_attention(AttentionSpec(scale=1.0, alibi=(0.5, 0.25)))
    # Layers may also attend to all keys.
    plain, blocks = AttentionSpec(scale=1.0), KeyBlockSpec(scale=1.0, selected_blocks=4, block_keys=8, local_blocks=1)
    selecting = msgspec.structs.replace(model, attention=(plain, *(blocks,) * (model.num_layers - 1)))
    wide = msgspec.structs.replace(model, head_dim=512)
    pattern = {"num_hidden_layers": 2, "hybrid_layer_pattern": [0, 0], "moe_layer_freq": [0, 0]}
    unlike = parse_model_config({"architectures": ["MiMoV2FlashForCausalLM"], **pattern})
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    bf16, fp16, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    for dtype, kv_dtype in ((bf16, bf16), (fp16, fp16), (bf16, fp8)):
        assert select_backend("auto", model, gpu, False, dtype, kv_dtype, 64) == "hopper"
    assert select_backend("auto", model, gpu, False, bf16, bf16, 16) == "triton"
    for config, deterministic, dtype, kv_dtype, block_size, reason in (
        (sloped, False, bf16, bf16, 64, "no ALiBi"),
        (selecting, False, bf16, bf16, 64, "no selected blocks of keys"),
        (wide, False, bf16, bf16, 64, "heads of 512"),
        (unlike, False, bf16, bf16, 64, "values of another size"),
        (model, True, bf16, bf16, 64, "--deterministic"),
        (model, False, fp16, fp8, 64, "this is float8_e4m3fn in float16"),
        (model, False, bf16, bf16, 16, "--block-size 64, this is 16"),
    ):
        with pytest.raises(ConfigError, match=f"'hopper' cannot run this model here: .*{reason}"):
            select_backend("hopper", config, gpu, deterministic, dtype, kv_dtype, block_size)
    capability[0] = (10, 0)
    with pytest.raises(ConfigError, match="'hopper' cannot run this model here: it needs a Hopper GPU"):
        select_backend("hopper", model, gpu, False, bf16, bf16, 64)
