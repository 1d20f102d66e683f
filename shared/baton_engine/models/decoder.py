"""The decoder-only transformer of the Llama line: Llama, Mistral, Qwen2 and Qwen3 differ in its ModelConfig alone.

The model is written as what happens between attention calls, so that a runner can put that into CUDA graphs.
"""

from collections.abc import Callable

import msgspec
import torch
from torch.nn import functional

from baton_engine.attention.backend import AttentionBackend
from baton_engine.kv_cache import KvCache
from baton_engine.loading import Weights
from baton_engine.model_config import ModelConfig
from baton_engine.ops import Ops

from .layers import Linear, Mlp
from .rotary import rotary_tables


class Tokens(msgspec.Struct):
    """The model's inputs, [T] int64 each, sequences one after another.

    slots: block * block_size + offset, where each token's KV goes; -1 = nowhere.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class Layer:
    """Grouped-query attention over the paged KV pool and an MLP, each after a norm that adds to the residual."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, cache: KvCache, ops: Ops) -> None:
        prefix = f"model.layers.{layer}"
        size, dim = config.hidden_size, config.head_dim
        outputs = [heads * dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self._input_norm = weights.take(f"{prefix}.input_layernorm.weight", (size,))
        names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        self._qkv = Linear.load(weights, names, outputs, size, config.qkv_bias, ops)
        name = f"{prefix}.self_attn.o_proj"
        self._output = Linear.load(weights, [name], [size], outputs[0], config.output_bias, ops)
        self._qk_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.qk_norm:
            q, k = (weights.take(f"{prefix}.self_attn.{name}_norm.weight", (dim,)) for name in "qk")
            self._qk_norms = q, k
        self._post_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", (size,))
        self._mlp = Mlp(weights, f"{prefix}.mlp", size, config.intermediate_size, config.mlp_bias, ops)
        self._layer, self._cache, self._ops = layer, cache, ops
        self._heads, self._eps = config.num_heads, config.rms_norm_eps

    def project(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        tokens: Tokens,
        rotary: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the tokens' keys and values into the cache and return their queries, [T, heads, head_dim].

        x: what is still to be added to the residual; None before the first layer. out: where the queries go.
        """
        if x is None:
            x = self._ops.add_rms_norm(residual, None, self._input_norm, self._eps)
        else:
            x = self._ops.add_rms_norm(x, residual, self._input_norm, self._eps)
        return self._ops.rope_and_cache(
            self._qkv(x), *rotary, tokens.positions, tokens.slots, *self._cache.layer(self._layer),
            self._heads, self._qk_norms, self._eps, out,
        )  # fmt: skip

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return what is still to be added to the residual. attended: [T, heads, head_dim]."""
        x = self._output(attended.flatten(1))
        return self._mlp(self._ops.add_rms_norm(x, residual, self._post_norm, self._eps))


class Decoder:
    """Token ids to hidden states, and hidden states to logits."""

    def __init__(self, config: ModelConfig, weights: Weights, cache: KvCache, max_positions: int, ops: Ops) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", shape)
        cos, sin = rotary_tables(config.rope, config.head_dim, max_positions)
        self._rotary = cos.to(weights.device), sin.to(weights.device)
        self._layers = [Layer(config, weights, layer, cache, ops) for layer in range(config.num_layers)]
        self._norm_weight = weights.take("model.norm.weight", (config.hidden_size,))
        head = self._embedding if config.tie_word_embeddings else weights.take("lm_head.weight", shape)
        self._head = Linear(head, None, ops)
        self._norm, self._eps = ops.add_rms_norm, config.rms_norm_eps
        self.num_layers = config.num_layers
        self.query_shape = (config.num_heads, config.head_dim)
        self.dtype = weights.dtype

    def forward(
        self, tokens: Tokens, backend: AttentionBackend, written: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Return hidden states [T, hidden]. The backend is prepared for these tokens.

        written: called with the number of each layer when what writes its KV has been launched.
        """
        residual = self.embed(tokens)
        attended: torch.Tensor | None = None
        for layer in range(self.num_layers):
            q = self.queries(layer, attended, residual, tokens)
            if written:
                written(layer)
            attended = torch.empty_like(q)
            backend.attend(layer, q, attended)
        assert attended is not None
        return self.hidden(attended, residual)

    def embed(self, tokens: Tokens) -> torch.Tensor:
        """Return the residual that the layers add to, [T, hidden]."""
        return functional.embedding(tokens.ids, self._embedding)

    def queries(
        self,
        layer: int,
        attended: torch.Tensor | None,
        residual: torch.Tensor,
        tokens: Tokens,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a layer's queries, [T, heads, head_dim], in out when given. attended: the result of the layer before,
        of the same shape."""
        x = None if attended is None else self._layers[layer - 1].finish(attended, residual)
        return self._layers[layer].project(x, residual, tokens, self._rotary, out)

    def hidden(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, hidden] from the last layer's attention."""
        x = self._layers[-1].finish(attended, residual)
        return self._norm(x, residual, self._norm_weight, self._eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, hidden]. Returns [R, vocab], in out when given."""
        return self._head(hidden, out)
