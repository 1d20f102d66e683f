"""JAIS of the first generation (Sengupta et al., "Jais and Jais-chat", 2023): GPT-2 with ALiBi, gated MLPs, and factors
of embeddings and logits that make learning rates independent of the width."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source

from .bloom import with_alibi
from .gpt2 import Gpt2Layer
from .gpt2_names import Gpt2Named, gpt2_fields, read_gpt2_like
from .llama import Defaults, Layer, LlamaConfig
from .unrotated import NO_ROPE, UnrotatedConfig


class JaisConfig(UnrotatedConfig, frozen=True, kw_only=True):
    """embedding_scale, logit_scale: the factors of embeddings and of logits."""

    embedding_scale: float
    logit_scale: float


class JaisLayer(Gpt2Layer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        source, hidden, inner = self.block(source, 1), config.hidden_size, config.intermediate_size
        columns, rows = Columns(source.ranks), Rows(source.ranks)
        gate_up = Linear(source, ["c_fc2", "c_fc"], [inner] * 2, hidden, bias=True, transposed=True, shard=columns)
        down = Linear(source, ["c_proj"], [hidden], inner, bias=True, transposed=True, shard=rows)
        return GatedMlp(gate_up, down, "silu")


class Jais(Gpt2Named):
    layer: Callable[..., Layer] = JaisLayer

    def __init__(self, config: JaisConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.head.finish_with(lambda logits: logits.mul_(config.logit_scale))

    def make_embedding(self, config: LlamaConfig, source: Source) -> Embedding:
        assert isinstance(config, JaisConfig)
        return Embedding(source, config.vocab_size, config.hidden_size, scale=config.embedding_scale)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.choice("activation_function", "gelu_new", ("swiglu",))
        file.choice("position_embedding_type", "learned", ("alibi",))
        for name, value in (
            ("add_cross_attention", False), ("alibi_scaling", None), ("reorder_and_upcast_attn", False),
            ("scale_attn_by_inverse_layer_idx", False), ("scale_attn_weights", True),
        ):  # fmt: skip
            file.require_absent(name, value)
        # Each of these fields has an older and a newer name.
        by_size = file.flag("scale_qk_dot_by_d", file.flag("mup_scale_qk_dot_by_d"))
        embedding_scale = file.number("embeddings_scale", file.number("mup_embeddings_scale", 1.0))
        width_scale = file.number("mup_output_alpha", 1.0) * file.number("mup_width_scale", 1.0)
        file = ConfigFile({**file.fields, "activation_function": "silu"})
        fields = gpt2_fields(file, 768, 12, 12, 1024)
        config = read_gpt2_like(
            JaisConfig,
            fields,
            50257,
            Defaults(1024, tie_word_embeddings=True),
            scale=1 / fields.count("head_dim") if by_size else None,
            rope=NO_ROPE,
            qkv_bias=True,
            output_bias=True,
            embedding_scale=embedding_scale,
            logit_scale=file.number("width_scale", width_scale),
        )
        return with_alibi(config)
