"""Ways to compute attention of chunks of prompts over a paged cache: Baton's kernel, and libraries where installed.

Each way takes a Chunks and returns a function that computes all its queries. What depends on sizes alone, such as a
plan of cuDNN, is done before that function is called. A way that cannot compute a variant raises an exception.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.runtime import driver

from baton_kernels.hopper_prefill import BLOCK_QUERIES, hopper_prefill
from baton_kernels.prefill_attention import prefill_attention, prefill_tiles, queries_per_tile
from baton_kernels.prefill_cuts import PROGRAMS, TileCuts, cut_tiles
from baton_kernels.reference.paged_attention import AttentionVariant

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Chunks:
    """The last tokens of sequences of one length in a paged cache, with as many of each sequence.

    q: [sequences * tokens, heads, head_dim]. keys, values: [blocks, block_size, kv_heads, head_dim]. tables:
    [sequences, blocks of a sequence] int32.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    tokens: int
    length: int
    variant: AttentionVariant

    @property
    def sequences(self) -> int:
        return len(self.tables)

    @property
    def operations(self) -> float:
        """Multiplications and additions of both products, of keys that are seen."""
        window = self.variant.window or self.length
        pairs = sum(min(position + 1, window) for position in range(self.length - self.tokens, self.length))
        return 4.0 * self.sequences * pairs * self.q.shape[1] * self.q.shape[2]

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.q.device)

    @property
    def starts(self) -> list[int]:
        return list(accumulate([self.tokens] * self.sequences, initial=0))

    def error(self, out: torch.Tensor, rows: int = 24) -> float:
        """Return the norm of the difference from float32 over its norm, for some queries of the last sequence."""
        some = torch.linspace(0, self.tokens - 1, min(rows, self.tokens), device=self.q.device).long()
        k, v = (cache[self.tables[-1].long()].flatten(0, 1)[: self.length] for cache in (self.keys, self.values))
        group = self.q.shape[1] // k.shape[1]
        k, v = (x.float().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        q = self.q[-self.tokens :][some].float().transpose(0, 1)
        scores = q @ k.transpose(1, 2) * self.variant.scale
        if self.variant.softcap:
            scores = self.variant.softcap * torch.tanh(scores / self.variant.softcap)
        ages = (some + self.length - self.tokens)[:, None] - torch.arange(self.length, device=some.device)
        hidden = (ages < 0) | (ages >= (self.variant.window or self.length))
        scores = scores.masked_fill(hidden, -math.inf)
        if self.variant.sinks is not None:
            scores = torch.cat([scores, self.variant.sinks[:, None, None].expand(-1, len(some), 1)], dim=2)
        expected = (scores.softmax(-1)[..., : self.length] @ v).transpose(0, 1)
        return float((out[-self.tokens :][some].float() - expected).norm() / expected.norm())


def ours(chunks: Chunks, cut: bool = True) -> Run:
    """Compute through Baton's kernel. cut: whether tiles may be computed in parts, as an engine does."""
    heads, dim = chunks.q.shape[1:]
    shared_memory = driver.active.utils.get_device_properties(0)["max_shared_mem"]
    queries = queries_per_tile(dim, chunks.q.element_size(), shared_memory)
    columns, cuts = prefill_tiles(chunks.starts, queries), None
    lengths, capacity = [chunks.length] * chunks.sequences, max(PROGRAMS // heads, 1)
    plan = cut_tiles(columns, chunks.starts, lengths, queries, chunks.variant.window, capacity) if cut else None
    if plan is not None:
        cuts = TileCuts(chunks.ints(plan.columns[2]).view(3, -1), chunks.ints(plan.columns[3]), plan.slots)
        columns = plan.columns[:2]
    tiles = chunks.ints(columns[0]), chunks.ints(columns[1])
    facts = chunks.tables, chunks.ints(lengths), chunks.ints(chunks.starts)
    return lambda: prefill_attention(
        chunks.q, chunks.keys, chunks.values, *facts, tiles, chunks.variant, block_queries=queries, cuts=cuts
    )


def hopper(chunks: Chunks) -> Run:
    """Compute through Baton's kernel for Hopper."""
    tiles = [chunks.ints(column) for column in prefill_tiles(chunks.starts, BLOCK_QUERIES)]
    facts = chunks.tables, chunks.ints([chunks.length] * chunks.sequences), chunks.ints(chunks.starts)
    return lambda: hopper_prefill(chunks.q, chunks.keys, chunks.values, *facts, (tiles[0], tiles[1]), chunks.variant)


def torch_cudnn(chunks: Chunks) -> Run:
    """Compute through cuDNN as torch calls it, which needs contiguous keys and whole prompts: its limit, not a way."""
    how, shape = chunks.variant, (chunks.sequences, chunks.tokens, -1, chunks.q.shape[2])
    if chunks.tokens != chunks.length or how.window or how.softcap or how.sinks is not None:
        raise ValueError("torch calls it for whole prompts without variants")
    q = chunks.q.view(shape).transpose(1, 2)
    k, v = (
        cache[chunks.tables.long()].flatten(1, 2)[:, : chunks.length].transpose(1, 2)
        for cache in (chunks.keys, chunks.values)
    )

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def cudnn_paged(chunks: Chunks) -> Run:
    """Compute through nvidia-cudnn-frontend, with page tables and a plan for these sizes."""
    import cudnn

    how, (heads, dim) = chunks.variant, chunks.q.shape[1:]
    if how.softcap or how.sinks is not None:
        raise ValueError("this adapter has no softcap and no sinks")
    kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[chunks.q.dtype]
    graph = cudnn.pygraph(
        io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT,
        handle=cudnn.create_handle(),
    )  # fmt: skip
    q = chunks.q.view(chunks.sequences, chunks.tokens, heads, dim).transpose(1, 2)
    out = torch.empty_like(chunks.q).view(chunks.sequences, chunks.tokens, heads, dim).transpose(1, 2)
    tables = chunks.tables[:, None, :, None]
    new, known = (chunks.ints([count] * chunks.sequences).view(-1, 1, 1, 1) for count in (chunks.tokens, chunks.length))
    # Containers are [blocks, kv_heads, block_size, head_dim], with the strides of the cache.
    tensors = [q, chunks.keys.transpose(1, 2), chunks.values.transpose(1, 2), tables, tables.clone(), new, known]
    facts = [graph.tensor_like(tensor) for tensor in tensors]
    attended, _ = graph.sdpa(
        name="sdpa", q=facts[0], k=facts[1], v=facts[2], generate_stats=False, attn_scale=how.scale,
        use_padding_mask=True, seq_len_q=facts[5], seq_len_kv=facts[6],
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT, diagonal_band_right_bound=0,
        diagonal_band_left_bound=how.window or None,
        paged_attention_k_table=facts[3], paged_attention_v_table=facts[4],
        paged_attention_max_seq_len_kv=chunks.tables.shape[1] * chunks.keys.shape[1],
    )  # fmt: skip
    attended.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=q.device)
    pack = {**dict(zip(facts, tensors, strict=True)), attended: out}

    def run() -> torch.Tensor:
        graph.execute(pack, workspace)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def flash_attention_4(chunks: Chunks) -> Run:
    """Compute through flash-attn-4, whose kernels are compiled by CUTLASS's Python package at the first call."""
    from flash_attn.cute import flash_attn_varlen_func

    how = chunks.variant
    starts, lengths = chunks.ints(chunks.starts), chunks.ints([chunks.length] * chunks.sequences)

    def run() -> torch.Tensor:
        out = flash_attn_varlen_func(
            chunks.q, chunks.keys, chunks.values, cu_seqlens_q=starts, max_seqlen_q=chunks.tokens,
            max_seqlen_k=chunks.length, seqused_k=lengths, page_table=chunks.tables, softmax_scale=how.scale,
            causal=True, window_size=(how.window - 1, 0) if how.window else (None, None),
            learnable_sink=how.sinks, softcap=how.softcap,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return run


def flash_attention_3(chunks: Chunks) -> Run:
    """Compute through FlashAttention 3 as vLLM's wheel has it, of which the folder vllm_flash_attn is enough."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    how = chunks.variant
    starts, lengths = chunks.ints(chunks.starts), chunks.ints([chunks.length] * chunks.sequences)

    def run() -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(
            chunks.q, chunks.keys, chunks.values, max_seqlen_q=chunks.tokens, cu_seqlens_q=starts,
            max_seqlen_k=chunks.length, seqused_k=lengths, block_table=chunks.tables, softmax_scale=how.scale,
            causal=True, window_size=[how.window - 1, 0] if how.window else [-1, -1], softcap=how.softcap,
            s_aux=None if how.sinks is None else how.sinks.to(chunks.q.dtype), fa_version=3,
        )  # fmt: skip
        return out

    return run


WAYS: dict[str, Callable[[Chunks], Run]] = {
    "ours": ours,
    "uncut": partial(ours, cut=False),
    "hopper": hopper,
    "torch-cudnn": torch_cudnn,
    "cudnn": cudnn_paged,
    "fa4": flash_attention_4,
    "fa3": flash_attention_3,
}
