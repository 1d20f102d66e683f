"""The kernels of compressed attention, and of attention over groups of tokens, on a CPU: each is its reference."""

import torch

from baton_engine.attention import triton_compressed
from baton_kernels.decode_parts import LENGTH, PART, ROW, SEQUENCE, DecodeParts
from baton_kernels.reference.compression import window_rows
from baton_kernels.reference.indexed import index_scores_reference, selection_reference
from baton_kernels.reference.paged_attention import AttentionVariant, paged_attention_reference


def latent_decode(
    q: torch.Tensor, latents: torch.Tensor, tables: torch.Tensor, parts: DecodeParts, scale: float, rank: int, *,
    sinks: torch.Tensor, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    assert rank == q.shape[2]
    queries = parts.plan[:, parts.plan[PART] == 0]
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    variant = AttentionVariant(scale, sinks=sinks)
    return out.copy_(
        paged_attention_reference(q, latents, latents, tables[queries[ROW]], queries[LENGTH], starts, variant)
    )


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, index_keys: torch.Tensor, tables: torch.Tensor, parts: DecodeParts,
    width: int, tokens: int, firsts: torch.Tensor | None, rate: int,
) -> torch.Tensor:  # fmt: skip
    groups = parts.plan[:, parts.plan[PART] == 0]
    starts = torch.arange(len(q) + 1, dtype=torch.int32) if firsts is None else firsts
    scores = torch.full((len(q), width), float("nan"))
    for group, length, row in zip(groups[SEQUENCE].tolist(), groups[LENGTH].tolist(), groups[ROW], strict=True):
        queries = slice(int(starts[group]), int(starts[group + 1]))
        assert queries.stop - queries.start <= tokens
        blocks = tables[row, : -(-length * rate // index_keys.shape[1])].long()
        keys = index_keys[blocks].flatten(0, 2)[rate - 1 :: rate][:length]
        scores[queries, :length] = index_scores_reference(q[queries], weights[queries], keys)
    return scores


def select_numbers(scores: torch.Tensor, lengths: torch.Tensor, size: int, most: int) -> torch.Tensor:
    numbers = torch.full((len(scores), most), -1, dtype=torch.int32)
    for own, line, length in zip(numbers, scores[:, 0], (lengths // size).tolist(), strict=True):
        found = selection_reference(line[:length], torch.ones(length, dtype=torch.bool), most).nonzero()[:, 0]
        own[: len(found)] = found
    return numbers


def pool_slots(
    numbers: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, tables: torch.Tensor, page: int, size: int
) -> torch.Tensor:  # fmt: skip
    slots = torch.full((len(lengths), numbers.shape[1] * size + size - 1), -1, dtype=torch.int32)
    for query, (length, row) in enumerate(zip(lengths.tolist(), rows.tolist(), strict=True)):
        ended = length // size
        chosen = numbers[query, : min(ended, numbers.shape[1]), None].long() * size + torch.arange(size)
        found = torch.cat([chosen.flatten(), torch.arange(ended * size, length)])
        slots[query, : len(found)] = tables[row, found // page] * page + found % page
    return slots


def entry_slots(
    lengths: torch.Tensor, rows: torch.Tensor, key_tables: torch.Tensor, key_row: int, window: int, width: int,
    page: int, entry_tables: torch.Tensor | None = None, entry_row: int = 0, rate: int = 0,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    found = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for query, (length, row) in enumerate(zip(lengths.tolist(), rows.tolist(), strict=True)):
        near = torch.arange(max(length - window, 0), length)
        parts = [key_row + key_tables[row, near // page] * page + near % page]
        if entry_tables is not None:
            chosen = torch.arange(length // rate)
            if numbers is not None:
                chosen = numbers[query, : len(chosen)].long()
            last = chosen * rate + rate - window_rows(rate)
            parts.append(entry_row + entry_tables[row, last // page] * page + last % page)
        listed = torch.cat(parts)
        found[query, : len(listed)] = listed
    return found


FAKES = (latent_decode, index_scores, select_numbers, entry_slots)
NAMES = ("plan_parts", *(fake.__name__ for fake in FAKES))
KERNELS = {name: getattr(triton_compressed, name) for name in NAMES}
