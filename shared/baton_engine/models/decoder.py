"""The decoder-only transformer of the Llama line: Llama, Mistral, Qwen2 and Qwen3 differ in its ModelConfig alone."""

import torch
from torch.nn import functional

from baton_engine.attention.backend import AttentionBackend, AttentionBatch
from baton_engine.kv_cache import KvCache
from baton_engine.loading import Weights
from baton_engine.model_config import ModelConfig
from baton_engine.ops import Ops, ops_for

from .layers import Linear, Mlp
from .rotary import rotary_tables


class Attention:
    """Grouped-query self-attention of one layer over the paged KV pool."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, backend: AttentionBackend, cache: KvCache, ops: Ops
    ) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        dim = config.head_dim
        outputs = [heads * dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._qkv = Linear.load(weights, names, outputs, config.hidden_size, config.qkv_bias)
        self._output = Linear.load(weights, [f"{prefix}.o_proj"], [config.hidden_size], outputs[0], config.output_bias)
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.qk_norm:
            q, k = (weights.take(f"{prefix}.{name}_norm.weight", (dim,)) for name in "qk")
            self._norms = q, k
        self._layer, self._backend, self._ops = layer, backend, ops
        self._keys, self._values = cache.layer(layer)
        self._heads, self._eps = config.num_heads, config.rms_norm_eps

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        q = self._ops.rope_and_cache(
            self._qkv(x), *rotary, positions, batch.slots, self._keys, self._values,
            self._heads, self._norms, self._eps,
        )  # fmt: skip
        return self._output(self._backend.attend(self._layer, q, batch).flatten(1))


class Layer:
    """Attention and MLP, each after a norm; the residual is carried beside, each norm adds what came before it."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, backend: AttentionBackend, cache: KvCache, ops: Ops
    ) -> None:
        prefix = f"model.layers.{layer}"
        size = config.hidden_size
        self._input_norm = weights.take(f"{prefix}.input_layernorm.weight", (size,))
        self._attention = Attention(config, weights, layer, backend, cache, ops)
        self._post_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", (size,))
        self._mlp = Mlp(weights, f"{prefix}.mlp", size, config.intermediate_size, config.mlp_bias, ops)
        self._norm, self._eps = ops.add_rms_norm, config.rms_norm_eps

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Return what is still to be added to the residual; x is that of the layer before, None before the first."""
        if x is None:
            x = self._norm(residual, None, self._input_norm, self._eps)
        else:
            x = self._norm(x, residual, self._input_norm, self._eps)
        x = self._attention(x, positions, rotary, batch)
        return self._mlp(self._norm(x, residual, self._post_norm, self._eps))


class Decoder:
    """Token ids to hidden states, and hidden states to logits."""

    def __init__(
        self, config: ModelConfig, weights: Weights, backend: AttentionBackend, cache: KvCache, max_positions: int
    ) -> None:
        ops = ops_for(weights.device)
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", shape)
        cos, sin = rotary_tables(config.rope, config.head_dim, max_positions)
        self._rotary = cos.to(weights.device), sin.to(weights.device)
        self._layers = [Layer(config, weights, layer, backend, cache, ops) for layer in range(config.num_layers)]
        self._norm_weight = weights.take("model.norm.weight", (config.hidden_size,))
        self._head = Linear(self._embedding if config.tie_word_embeddings else weights.take("lm_head.weight", shape))
        self._norm, self._eps = ops.add_rms_norm, config.rms_norm_eps

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """token_ids, positions: [T] int64, sequences one after another. Returns hidden states [T, hidden]."""
        residual = functional.embedding(token_ids, self._embedding)
        x: torch.Tensor | None = None
        for layer in self._layers:
            x = layer(x, residual, positions, self._rotary, batch)
        assert x is not None
        return self._norm(x, residual, self._norm_weight, self._eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden]. Returns [R, vocab]."""
        return self._head(hidden)
