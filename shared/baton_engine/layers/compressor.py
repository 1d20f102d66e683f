"""What turns windows of tokens into entries of compressed attention, and what selects some of these entries."""

import torch
from torch.nn import functional

from baton_engine.compressed_spec import CompressedSpec
from baton_engine.context import Context
from baton_engine.source import Source
from baton_kernels.reference.compression import Compression

from .linear import Linear

Rotary = tuple[torch.Tensor, torch.Tensor]


class Compressor:
    """Writes an entry to the cache whenever a window of tokens ends, as compress_reference does. All ranks compute the
    same.

    source: of its tensors. layers: of the cache, with the states and with the entries. eps: of the norm of entries.
    """

    def __init__(
        self, source: Source, layers: tuple[int, int], shape: Compression, hidden: int, eps: float, rotary: Rotary
    ) -> None:
        (self._states, self._entries), self._shape = layers, shape
        self._op, self._eps, self._rotary = source.ops.compress, eps, rotary
        width = shape.series * shape.dim
        self._projection = Linear(source, ["kv_proj", "gate_proj"], [width, width], hidden, sensitive=True)
        self._bias = source.take("position_bias", (shape.rate, width), dtype=torch.float32)
        self._norm = source.take("kv_norm.weight", (shape.dim,), dtype=torch.float32)

    def __call__(self, x: torch.Tensor, ctx: Context) -> None:
        """x: [T, hidden]."""
        _, states = ctx.cache(self._states)
        slots, entries = ctx.cache(self._entries)
        self._op(
            self._projection(x), self._bias, self._norm, self._eps, self._rotary, ctx.positions,
            ctx.recent_slots(self._states), slots, states, entries, self._shape,
        )  # fmt: skip


class EntryIndexer:
    """Selects the entries that a layer attends to by keys of their own (DeepSeek-AI, "DeepSeek-V4", 2026). All ranks
    compute the same.

    source: of its tensors. layer: of the cache, with the keys of the layer's tokens. keys: writes the entries' index
    keys. low_rank: elements of the vectors from which its queries are computed.
    """

    def __init__(
        self, source: Source, layer: int, spec: CompressedSpec, keys: Compressor, heads: int, hidden: int,
        low_rank: int, rotary: Rotary,
    ) -> None:  # fmt: skip
        assert spec.entries is not None
        dim = spec.entries.index_dim
        self._layer, self._heads, self._keys = layer, heads, keys
        self._turn, self._rotary = source.ops.turn_ends, rotary
        self._queries = Linear(source, ["q_b_proj"], [heads * dim], low_rank, sensitive=True)
        # The products of each head are scaled by dim ** -0.5, and their sum by heads ** -0.5. The weights can contain
        # both factors, because relu commutes with factors above 0.
        factor = (heads * dim) ** -0.5
        self._weights = source.take("scorer.weights_proj.weight", (heads, hidden), dtype=torch.float32) * factor

    def __call__(self, x: torch.Tensor, query_inputs: torch.Tensor, ctx: Context) -> None:
        """x: [T, hidden]. query_inputs: [T, low_rank]."""
        self._keys(x, ctx)
        queries = torch.unflatten(self._queries(query_inputs), 1, (self._heads, -1))
        queries = self._turn(queries, self._rotary, ctx.positions)
        ctx.select(self._layer, queries, functional.linear(x.float(), self._weights))
