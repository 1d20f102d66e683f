"""ModernBERT Decoder (Weller et al., "Seq vs Seq: An Open Suite of Paired Encoders and Decoders", 2025): LayerNorms,
one of the embedding in place of the first layer's, windows in most layers, and a layer between the last norm and the
head."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.embedding import Head, head
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import NoNorm
from baton_engine.layers.rope import Rope
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS

from .layer_norm_llama import LayerNormConfig, LayerNormLayer, LayerNormLlama
from .llama import HIDDEN_ACTS, Defaults, Layer, LlamaConfig, llama_fields, read_llama_config
from .phi3 import fused_gate_up
from .sliding_windows import WithWindowRope, ropes_by_window


class ModernBertDecoderConfig(WithWindowRope, LayerNormConfig, frozen=True, kw_only=True):
    """head_activation: of the layer before the head, a key of ACTIVATIONS. last_bias, head_bias: whether that layer and
    the head have biases."""

    window_rope: Rope
    head_activation: str
    last_bias: bool
    head_bias: bool


class ModernBertDecoderLayer(LayerNormLayer):
    blocks = ("attn", "mlp")
    norms = ("attn_norm", "mlp_norm")
    output = down = "Wo"

    def make_attention_norm(self, config: Any, source: Source, layer: int) -> Any:
        return super().make_attention_norm(config, source, layer) if layer else NoNorm()

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_gate_up(config, source, "Wi")


class ModernBertDecoder(LayerNormLlama):
    layer: Callable[..., Layer] = ModernBertDecoderLayer
    embedding_name, final_norm, head_name = "embeddings.tok_embeddings", "final_norm", "decoder"

    def __init__(self, config: ModernBertDecoderConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.embedding_norm = config.norm(self.parts(source)[0].at("embeddings.norm"))

    def make_head(self, config: LlamaConfig, source: Source) -> Head:
        assert isinstance(config, ModernBertDecoderConfig)
        made = head(source, self.embedding, config.tie_word_embeddings, self.head_name, config.head_bias)
        if source.stage.is_last:
            inside, hidden = source.at("lm_head"), config.hidden_size
            last = Linear(inside, ["dense"], [hidden], hidden, bias=config.last_bias)
            norm, activation = config.norm(inside.at("norm")), ACTIVATIONS[config.head_activation]
            made.begin_with(lambda x: norm(activation(last(x))))
        return made

    def embed(self, ctx: Context) -> torch.Tensor:
        return self.embedding_norm(self.embedding(ctx.ids))

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = llama_fields(
            file, "hidden_activation", hidden_size=("hidden_size", 768), num_hidden_layers=("num_hidden_layers", 22),
            num_attention_heads=("num_attention_heads", 12), intermediate_size=("intermediate_size", 1152),
        )  # fmt: skip
        # transformers scales the rotation of layers with a window, too, which no published model needs.
        file.require_absent("rope_scaling")
        layers, context = file.count("num_hidden_layers"), file.count("max_position_embeddings", 8192)
        bias = file.flag("attention_bias")
        theta, window_theta = file.number("global_rope_theta", 160000.0), file.number("local_rope_theta", 10000.0)
        rope, window_rope = ropes_by_window(file, context, theta, window_theta)
        return read_llama_config(
            ModernBertDecoderConfig,
            file.with_defaults({"vocab_size": 50368, "eos_token_id": 50282}),
            Defaults(8192, tie_word_embeddings=True),
            _windows(file, layers),
            rope=rope,
            window_rope=window_rope,
            eps=file.number("norm_eps", 1e-5),
            activation="gelu",
            norm_bias=file.flag("norm_bias"),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
            head_activation=HIDDEN_ACTS[file.choice("classifier_activation", "gelu", tuple(HIDDEN_ACTS))],
            last_bias=file.flag("classifier_bias"),
            head_bias=file.flag("decoder_bias", True),
        )


def _windows(file: ConfigFile, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: half of local_attention where layer_types says so, or else in all but the first
    and every global_attn_every_n_layers-th after it."""
    window, every = file.count("local_attention", 128) // 2, file.count("global_attn_every_n_layers", 3)
    if not window:
        raise ConfigError("local_attention in config.json must be at least 2")
    types = file.layer_types("layer_types", layers)
    if types is None:
        types = ["sliding_attention" if layer % every else "full_attention" for layer in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)
