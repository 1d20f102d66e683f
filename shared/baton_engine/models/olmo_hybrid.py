"""OLMo Hybrid (Ai2, 2026): three of four layers have the gated delta rule, the others OLMo 3's attention, with norms
after each block, and maybe without rotation."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.linear import Linear
from baton_engine.layers.recurrence import Delta, GatedDelta, OneProjection
from baton_engine.layers.rope import rope_fields
from baton_engine.shard import Columns
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .llama import Defaults, Layer, Llama, LlamaConfig, LlamaLayer, RotaryTables, read_llama_config
from .olmo2 import Olmo2Layer
from .recurrent_states import WithStates, read_delta, state_windows
from .rotary_config import MaybeRotates

_NORM_EPS = 1e-5  # of heads, whatever config.json says of other norms


class OlmoHybridConfig(WithStates, MaybeRotates, LlamaConfig, frozen=True, kw_only=True):
    """most: as in Delta."""

    rotates: bool
    state_layers: frozenset[int]
    states: StateShape
    most: float

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "most_replaced": self.most}


class StateLayer(LlamaLayer):
    blocks = ("linear_attn", "mlp")
    norms = ("attention_layer_norm", "feedforward_layer_norm")

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, OlmoHybridConfig)
        shape = config.states
        outputs = [shape.keys, shape.keys, shape.values, shape.values, shape.value_heads, shape.value_heads]
        names = ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"]
        projection = Linear(source, names, outputs, config.hidden_size, shard=Columns(source.ranks, "channels"))
        compute = OneProjection(projection, shape.part(source.ranks.count))
        how = Delta(("q_conv1d", "k_conv1d", "v_conv1d"), "o_norm", "o_proj", most=config.most)
        return GatedDelta(source, layer, compute, shape, how, config.hidden_size, _NORM_EPS)


class AttentionLayer(Olmo2Layer):
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        # transformers renames the norms of all layers alike when it saves a model.
        first = next((name for name in StateLayer.norms[1:] if f"{name}.weight" in source), self.post_norms[0])
        self.post_norms = (first, self.post_norms[1])
        super().__init__(config, source, layer, rotary)


class OlmoHybrid(Llama):
    def make_layers(self, config: LlamaConfig, source: Source, rotary: RotaryTables) -> list[Layer]:
        assert isinstance(config, OlmoHybridConfig)
        kinds = {True: StateLayer, False: AttentionLayer}
        return [
            kinds[layer in config.state_layers](
                config, source.at(f"{self.layers_name}.{layer}"), layer, rotary[config.rope_of(layer)]
            )
            for layer in source.stage.layers(config.num_layers)
        ]

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, heads = file.count("num_hidden_layers"), file.count("num_attention_heads")
        key_heads = file.count("linear_num_key_heads", heads)
        key_dim = file.count("linear_key_head_dim", max(int(0.75 * file.count("hidden_size") / key_heads), 1))
        defaults = {
            "linear_num_key_heads": key_heads, "linear_num_value_heads": heads, "linear_key_head_dim": key_dim,
            "linear_value_head_dim": 2 * key_dim,
        }  # fmt: skip
        state_layers, shape = read_delta(file.with_defaults(defaults), file.count("num_key_value_heads", heads), layers)
        bias = file.flag("attention_bias")
        return read_llama_config(
            OlmoHybridConfig,
            file,
            Defaults(65_536),
            state_windows(state_layers, layers),
            qkv_bias=bias,
            output_bias=bias,
            rotates=(rope_fields(file).get("rope_theta") or file.fields.get("rope_theta")) is not None,
            state_layers=state_layers,
            states=shape,
            most=2.0 if file.flag("linear_allow_neg_eigval", True) else 1.0,
        )
