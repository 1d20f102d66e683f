"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Llama with Mamba 2 in place of attention in most layers."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.recurrence import Mamba
from baton_engine.layers.rope import read_rope
from baton_kernels.reference.recurrence import StateShape

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .recurrent_states import StateOrAttention, WithStates, read_mamba, state_windows


class BambaConfig(WithStates, LlamaConfig, frozen=True, kw_only=True):
    state_layers: frozenset[int]
    states: StateShape | None
    mamba: Mamba


class BambaLayer(StateOrAttention, LlamaLayer):
    blocks = ("self_attn", "feed_forward")
    norms = ("input_layernorm", "pre_ff_layernorm")


class Bamba(Llama):
    layer = BambaLayer
    final_norm = "final_layernorm"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, context = file.count("num_hidden_layers"), file.count("max_position_embeddings", 262_144)
        state_layers = frozenset(range(layers)) - set(file.integers("attn_layer_indices"))
        shape, fields = read_mamba(file, file.count("num_key_value_heads", 8))
        bias = file.flag("attention_bias")
        return read_llama_config(
            BambaConfig,
            file,
            Defaults(context, num_kv_heads=8, rms_norm_eps=1e-5),
            state_windows(state_layers, layers),
            rope=read_rope(file, context, 0.5),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
            state_layers=state_layers,
            states=shape if state_layers else None,
            mamba=fields,
        )
