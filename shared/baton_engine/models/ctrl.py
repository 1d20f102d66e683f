"""CTRL (Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation", 2019): sinusoids
as positions, LayerNorms, biases, and MLPs of ReLUs."""

import torch
from torch.nn import functional

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.linear import Linear
from baton_engine.shard import Heads
from baton_engine.source import Source

from .layer_norm_llama import LayerNormLlama, PlainMlpLayer
from .llama import Defaults, LlamaConfig, llama_fields, read_llama_config
from .unrotated import NO_ROPE, UnrotatedConfig

_EPS = 1e-6


class CtrlLayer(PlainMlpLayer):
    blocks = ("multi_head_attention", "ffn")
    norms = ("layernorm1", "layernorm2")
    output = "dense"
    projections = ("0", "2")

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        hidden, shard = config.hidden_size, Heads(source.ranks, config.head_dim)
        return Linear(source, ["Wq", "Wk", "Wv"], [hidden] * 3, hidden, bias=True, shard=shard)


class Ctrl(LayerNormLlama):
    layer = CtrlLayer
    embedding_name, layers_name, final_norm, head_bias = "w", "h", "layernorm", True

    def __init__(self, config: UnrotatedConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.positions = _sinusoids(max_positions, config.hidden_size).to(dtype=source.dtype, device=source.device)
        self.scale = config.hidden_size**0.5

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("transformer"), source

    def embed(self, ctx: Context) -> torch.Tensor:
        return self.embedding(ctx.ids).mul_(self.scale).add_(functional.embedding(ctx.positions, self.positions))

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # The norms within layers always have this epsilon.
        file.require_absent("layer_norm_epsilon", _EPS)
        file = llama_fields(
            file, hidden_size=("n_embd", 1280), num_hidden_layers=("n_layer", 48),
            num_attention_heads=("n_head", 16), intermediate_size=("dff", 8192),
            max_position_embeddings=("n_positions", 256),
        )  # fmt: skip
        return read_llama_config(
            UnrotatedConfig,
            file.with_defaults({"vocab_size": 246534}),
            Defaults(256, tie_word_embeddings=True),
            eps=_EPS,
            rope=NO_ROPE,
            activation="relu",
            activations={"relu": "relu"},
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        )


def _sinusoids(count: int, size: int) -> torch.Tensor:
    """Return [count, size] float32: sines and then cosines of the positions.

    Periods grow from 2 pi to almost 20,000 pi, unlike those of layers.embedding.sinusoids, which reach it.
    """
    periods = torch.pow(10000, torch.arange(size).float().div(2).floor() * 2 / size)
    angles = torch.arange(count).float()[:, None] * (1 / periods)
    return torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=1)
