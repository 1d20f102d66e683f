"""Attention of which each token chooses the query heads."""

from dataclasses import replace

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.model_config import ModelConfig
from baton_engine.shard import head_part
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .experts import Router
from .linear import Linear


class ExpertHeads:
    """Mixture of attention heads (Zhang et al., 2022), as JetMoE has it (Shen et al., 2024): experts have a query for
    each key-value head, and an output projection. A token uses some of them, whose results are added up by the router's
    weights.

    Queries of all experts are computed, since a batch uses all experts. So the time of a step does not depend on which
    are chosen, and CUDA graphs need no groups of tokens. Each rank has the queries of its key-value heads.

    keys_values: the projection to the keys and values of this rank's heads. bias: [hidden], of the sum. rotary: as in
    Attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        source: Source,
        routing: Routing,
        keys_values: Linear,
        bias: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        count, dim, hidden = config.num_experts, config.head_dim, config.hidden_size
        own, size = head_part(config.num_kv_heads, source.ranks), config.num_kv_heads * dim
        part = slice(own.start * dim, own.stop * dim)
        every = slice(0, count)
        into = source.take("input_linear.weight", (count, size, hidden), (every, part, slice(0, hidden)))
        out = source.take("output_linear.weight", (count, hidden, size), (every, slice(0, hidden), part))
        self._into, self._out = into.flatten(0, 1), out.transpose(0, 1).flatten(1)
        # Each rank has a part of all experts of attention, also with --expert-parallel.
        self._router = Router(source.at("router.layer"), replace(routing, own=range(count)), count, hidden)
        self._layer, self._ops, self._ranks = layer, source.ops, source.ranks
        self._keys_values, self._bias, self._rotary = keys_values, bias, rotary
        self._shape, self.inputs = (count, own.stop - own.start, dim), self._router.inputs

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """As Attention does."""
        x, weights, experts = self._router(x)
        tokens, (count, heads, dim) = len(x), self._shape
        # At start, steps also run without kernels. The indices of experts are then what was in their memory before, and
        # `gather` takes only valid ones.
        chosen = experts.long().clamp_(0, count - 1)[:, :, None].expand(-1, -1, heads * dim)
        queries = self._ops.linear(x, self._into, None, None).view(tokens, count, -1).gather(1, chosen)
        # The queries of a key-value head follow each other.
        queries = queries.view(tokens, -1, heads, dim).transpose(1, 2).flatten(1)
        qkv, query_heads = torch.cat([queries, self._keys_values(x)], dim=1), queries.shape[1] // dim
        q = self._ops.rope_and_cache(
            qkv, self._rotary, ctx.positions, *ctx.cache(self._layer), query_heads, None, 0.0,
            ctx.queries(tokens, query_heads, dim), ctx.inverse_scales(self._layer),
        )  # fmt: skip
        attended = ctx.attend(self._layer, q).view(tokens, heads, -1, dim).transpose(1, 2)
        weighted = (attended.flatten(2) * weights[:, :, None]).to(x.dtype)
        placed = weighted.new_zeros(tokens, count, heads * dim).scatter_(1, chosen, weighted)
        return self._ranks.sum(self._ops.linear(placed.flatten(1), self._out, None, None)).add_(self._bias)
