"""nanochat (Karpathy, 2025): norms without weights, also of the embeddings, squared ReLU, a softcap on logits."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.norm import RmsNorm, UnitNorm
from baton_engine.layers.rope import read_rope_before_norms
from baton_engine.source import Source

from .gemma3 import read_softcap, set_softcap
from .layer_norm_llama import plain_mlp
from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config


class NanoChatConfig(LlamaConfig, frozen=True, kw_only=True):
    logit_softcap: float  # as in set_softcap


class NanoChatLayer(LlamaLayer):
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        assert rotary is not None
        cos, sin = rotary
        # nanochat rotates in the other direction than Llama.
        self.attention = self.make_attention(config, source.at("self_attn"), layer, (cos, -sin))
        self.mlp = self.make_mlp(config, source, layer)
        norm = UnitNorm(source, config.hidden_size, config.rms_norm_eps)
        self.input_norm, self.post_attention_norm = norm.before(self.attention), norm.before(self.mlp)

    def qk_norms(self, config: LlamaConfig, source: Source) -> tuple[RmsNorm, RmsNorm]:
        # A rotation keeps the root mean square of a head, so norms without weights may come before it.
        norm = UnitNorm(source, config.head_dim, config.rms_norm_eps)
        return norm, norm

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        return plain_mlp(config, source.at("mlp"), ("fc1", "fc2"))


class NanoChat(Llama):
    layer = NanoChatLayer

    def __init__(self, config: NanoChatConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        set_softcap(self.head, config.logit_softcap)

    def make_norm(self, config: LlamaConfig, source: Source) -> RmsNorm:
        return UnitNorm(source, config.hidden_size, config.rms_norm_eps)

    def embed(self, ctx: Context) -> torch.Tensor:
        embedded: torch.Tensor = self.norm(super().embed(ctx))
        return embedded

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("attention_bias")
        return read_llama_config(
            NanoChatConfig,
            file,
            Defaults(2048),
            rope=read_rope_before_norms(file, file.count("max_position_embeddings", 2048)),
            activation="relu2",
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            logit_softcap=read_softcap(file, "final_logit_softcapping", 15.0),
        )
