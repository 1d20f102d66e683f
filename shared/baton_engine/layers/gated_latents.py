"""Latent attention whose results have gates."""

from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.inputs import NUMBERS, InputRows
from baton_engine.latent_spec import LatentSpec
from baton_engine.shard import Heads
from baton_engine.source import Source

from .latent_attention import EPS, LatentAttention, Queries
from .linear import Linear
from .norm import RmsNorm


class GatedQueries(Queries):
    """Computes gates, too. One projection turns the compressed vector, once with its norm and then without, into the
    query of each head and its gates."""

    def __init__(self, source: Source, spec: LatentSpec, hidden: int, heads: int, low_rank: int, bias: bool) -> None:
        names = ["q_a_proj", "kv_a_proj_with_mqa"]
        self._size, self._query_dim, self._outputs = low_rank, spec.query_dim, spec.query_dim + spec.value_dim
        self._down = Linear(source, names, [low_rank, spec.latent_dim], hidden, bias=bias)
        self._plain_norm = RmsNorm(source.at("q_a_layernorm"), low_rank, EPS)
        shard = Heads(source.ranks, self._outputs)
        self._both = Linear(source, ["q_b_proj"], [heads * self._outputs], 2 * low_rank, shard=shard)
        self.inputs = self._down.inputs

    def with_gates(self, x: InputRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what Queries does, and the gates of this rank's heads, [T, heads * value_dim]."""
        first = self._down(x)
        compressed, kv = first[:, : self._size], first[:, self._size :]
        normed = self._plain_norm(compressed)
        heads = torch.unflatten(self._both(torch.cat([normed, compressed], dim=1)), 1, (-1, self._outputs))
        q, gates = heads[..., : self._query_dim], heads[..., self._query_dim :]
        return q.flatten(1), kv, normed, gates.flatten(1)


class GatedLatentAttention(LatentAttention):
    """Latent attention whose results are multiplied by sigmoids of gates (SK Telecom, A.X K2, 2026)."""

    _queries: GatedQueries

    def make_queries(
        self, source: Source, spec: LatentSpec, hidden: int, heads: int, low_rank: int | None, plain: bool, bias: bool
    ) -> GatedQueries:
        assert low_rank is not None
        return GatedQueries(source, spec, hidden, heads, low_rank, bias)

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        q, kv, compressed, gates = self._queries.with_gates(x)
        attended = self.attend(x, q, kv, compressed, ctx).flatten(1)
        return self._output((attended * gates.float().sigmoid()).to(attended.dtype))


class HeadGatedLatents(LatentAttention):
    """Latent attention with one gate for each head's result (Ling Team, Ling 3.0, 2026).

    The arguments are those of LatentAttention. gates: the name of the projection that makes them.
    """

    gates = "g_proj"

    def __init__(self, source: Source, layer: int, spec: LatentSpec, *, hidden: int, heads: int, **how: Any) -> None:
        super().__init__(source, layer, spec, hidden=hidden, heads=heads, **how)
        each = self.gates_of_head(spec)
        self._gates = Linear(source, [self.gates], [heads * each], hidden, shard=Heads(source.ranks, each))
        # The two projections may be stored in formats that take different forms of the inputs.
        self.inputs = NUMBERS

    def gates_of_head(self, spec: LatentSpec) -> int:
        """Return how many gates a head has: one for each equal part of its result."""
        return 1

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        attended, gates = self.attend(x, *self._queries(x), ctx), self._gates(x).float().sigmoid()
        gates = gates.to(attended.dtype).view(len(gates), attended.shape[1], -1)
        return self._output((attended * gates).flatten(1))


class NormedGatedLatents(HeadGatedLatents):
    """As HeadGatedLatents, with a norm of the keys' rotated elements (dots studio, dots3-note, 2026)."""

    rope_norm = "k_rope_only_layernorm"


class ElementGatedLatents(HeadGatedLatents):
    """Latent attention with a gate for each element of a head's result (Tencent, Hy4, 2026)."""

    gates = "linear_gate"

    def gates_of_head(self, spec: LatentSpec) -> int:
        return spec.value_dim
