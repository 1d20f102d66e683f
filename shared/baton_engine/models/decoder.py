"""The decoder-only transformer of the Llama line: Llama, Mistral, Qwen2 and Qwen3 differ in its ModelConfig alone."""

import torch
from torch.nn import functional

from baton_engine.attention.backend import AttentionBackend, AttentionBatch
from baton_engine.loading import Weights
from baton_engine.model_config import ModelConfig

from .layers import Linear, Mlp, RmsNorm
from .rotary import Rotary, rotate


class Attention:
    """Grouped-query self-attention of one layer over the paged KV pool."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, backend: AttentionBackend) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self._layer = layer
        self._backend = backend
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        outputs = [heads * self._head_dim for heads in (self._heads, self._kv_heads, self._kv_heads)]
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._qkv = Linear.load(weights, names, outputs, config.hidden_size, config.qkv_bias)
        self._output = Linear.load(weights, [f"{prefix}.o_proj"], [config.hidden_size], outputs[0], config.output_bias)
        self._norms: tuple[RmsNorm, RmsNorm] | None = None
        if config.qk_norm:
            q, k = (weights.take(f"{prefix}.{name}_norm.weight", (self._head_dim,)) for name in "qk")
            self._norms = RmsNorm(q, config.rms_norm_eps), RmsNorm(k, config.rms_norm_eps)

    def __call__(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], batch: AttentionBatch
    ) -> torch.Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        qk, v = torch.split(heads, [self._heads + self._kv_heads, self._kv_heads], dim=1)
        if self._norms is not None:
            qk = torch.cat((self._norms[0](qk[:, : self._heads]), self._norms[1](qk[:, self._heads :])), dim=1)
        qk = rotate(qk, *rotation)
        out = self._backend.attend(self._layer, qk[:, : self._heads], qk[:, self._heads :], v, batch)
        return self._output(out.flatten(1))


class Layer:
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, backend: AttentionBackend) -> None:
        prefix = f"model.layers.{layer}"
        size = config.hidden_size
        self._input_norm = RmsNorm(weights.take(f"{prefix}.input_layernorm.weight", (size,)), config.rms_norm_eps)
        self._attention = Attention(config, weights, layer, backend)
        post = weights.take(f"{prefix}.post_attention_layernorm.weight", (size,))
        self._post_norm = RmsNorm(post, config.rms_norm_eps)
        self._mlp = Mlp(weights, f"{prefix}.mlp", size, config.intermediate_size, config.hidden_act, config.mlp_bias)

    def __call__(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], batch: AttentionBatch
    ) -> torch.Tensor:
        x += self._attention(self._input_norm(x), rotation, batch)
        x += self._mlp(self._post_norm(x))
        return x


class Decoder:
    """Token ids to hidden states, and hidden states to logits."""

    def __init__(self, config: ModelConfig, weights: Weights, backend: AttentionBackend, max_positions: int) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", shape)
        self._rotary = Rotary(config.rope, config.head_dim, max_positions, weights.dtype, weights.device)
        self._layers = [Layer(config, weights, layer, backend) for layer in range(config.num_layers)]
        self._norm = RmsNorm(weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        self._head = Linear(self._embedding if config.tie_word_embeddings else weights.take("lm_head.weight", shape))

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """token_ids, positions: [T] int64, sequences one after another. Returns hidden states [T, hidden]."""
        x = functional.embedding(token_ids, self._embedding)
        rotation = self._rotary.at(positions)
        for layer in self._layers:
            x = layer(x, rotation, batch)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden]. Returns [R, vocab] float32."""
        return self._head(hidden).float()
