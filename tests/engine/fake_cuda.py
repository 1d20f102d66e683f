"""The GPU's runner on a CPU: each kernel is its reference, and a graph is replayed by running its work again.

It cannot test asynchrony, captured memory or speed, for which a GPU is needed, but it tests the resulting tokens.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch

from baton_engine import cuda_runner
from baton_engine.config import EngineConfig
from baton_engine.cuda_runner import CudaRunner
from baton_engine.loading import Progress
from baton_engine.model_config import ModelConfig
from baton_engine.ops import TORCH, Ops
from baton_engine.step_plan import StepPlan
from baton_kernels.decode_parts import FIELDS, LENGTH, PART, PARTS, ROW, SEQUENCE, TILE_KEYS, DecodeParts
from baton_kernels.latent_prefill import GATHER_TOKENS
from baton_kernels.prefill_cuts import TileCuts
from baton_kernels.reference.decode_parts import parts_reference
from baton_kernels.reference.indexed import selection_reference
from baton_kernels.reference.key_blocks import key_block_scores_reference, key_block_selection_reference
from baton_kernels.reference.latent import (
    absorb_queries_reference,
    latent_prefill_reference,
    values_of_reference,
)
from baton_kernels.reference.logprobs import chosen_logprobs_reference
from baton_kernels.reference.masks import apply_masks_reference
from baton_kernels.reference.paged_attention import AttentionVariant, paged_attention_reference
from baton_kernels.reference.penalties import apply_penalties_reference
from baton_kernels.reference.sampling import best_of_shards_reference, gumbel_argmax_reference, gumbel_best_reference
from baton_kernels.reference.thresholds import thresholds_reference

from .fake_entries import FAKES, index_scores, pool_slots, select_numbers


class Graph:
    """`replay` computes the results of the capture again from the present inputs, into the same memory."""

    def __init__(self, run: Callable[[], Any], result: Any) -> None:
        self._run, self._result = run, result

    def replay(self) -> None:
        result = self._run()
        pairs = zip(self._result, result, strict=True) if isinstance(result, tuple) else [(self._result, result)]
        for old, new in pairs:
            if old is not new:
                old.copy_(new)


class Piece:
    """One of the graphs into which a function was cut. They are replayed in turn, and the first one starts a run."""

    def __init__(self, pieces: "Pieces", index: int) -> None:
        self._pieces, self._index = pieces, index

    def replay(self) -> None:
        self._pieces.go_on(self._index)


class Pieces:
    """Runs a function in a thread of its own, which waits at each cut until the next piece is replayed."""

    def __init__(self, run: Callable[[Callable[[], None]], Any]) -> None:
        self._run = run
        self.count = 1
        self.result = run(self._count)

    def _count(self) -> None:
        self.count += 1

    def go_on(self, index: int) -> None:
        if index == 0:
            self._turns: queue.Queue[None] = queue.Queue()
            self._reached: queue.Queue[BaseException | None] = queue.Queue()
            threading.Thread(target=self._work, daemon=True).start()
        self._turns.put(None)
        error = self._reached.get(timeout=60)
        if error is not None:
            raise error

    def _work(self) -> None:
        def cut() -> None:
            self._reached.put(None)
            self._turns.get()

        self._turns.get()
        try:
            with torch.inference_mode():
                # The result is the recording, which holds the resolved ids, and the hidden states.
                for old, new in zip(self.result, self._run(cut), strict=True):
                    old, new = (getattr(part, "ids", part) for part in (old, new))
                    if old is not new:
                        old.copy_(new)
        except BaseException as error:
            self._reached.put(error)
        else:
            self._reached.put(None)


class Recorder:
    def __init__(self) -> None:
        self.released = False

    def release(self) -> None:
        self.released = True

    def record(self, run: Callable[[], Any]) -> tuple[Graph, Any]:
        result = run()
        return Graph(run, result), result

    def record_pieces(self, run: Callable[[Callable[[], None]], Any]) -> tuple[list[Piece], Any]:
        pieces = Pieces(run)
        return [Piece(pieces, index) for index in range(pieces.count)], pieces.result


class Event:
    def record(self) -> None: ...

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    variant: AttentionVariant,
    parts: DecodeParts,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    early: bool = True,
) -> None:
    firsts = parts.plan[:, parts.plan[PART] == 0]
    own = firsts[SEQUENCE]
    starts = torch.arange(len(own) + 1, dtype=torch.int32)
    found = tables[firsts[ROW]], firsts[LENGTH]
    out[own] = paged_attention_reference(q[own], keys, values, *found, starts, variant, scales)


def plan_parts(lengths: torch.Tensor, rows: torch.Tensor, capacity: int, arrivals: torch.Tensor) -> DecodeParts:
    found = parts_reference(lengths.tolist(), rows.tolist(), capacity, TILE_KEYS)
    plan = torch.tensor(found, dtype=torch.int64).view(-1, FIELDS).T
    first = plan[PART] == 0
    spans = torch.stack([first.nonzero()[:, 0], plan[PARTS, first]])
    return DecodeParts(plan, spans, arrivals)


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor],
    variant: AttentionVariant,
    out: torch.Tensor,
    block_queries: int,
    uniform: bool,
    scales: torch.Tensor | None,
    cuts: TileCuts | None,
) -> None:
    assert cuts is None or cuts.tiles.shape == (3, len(tiles[0]))
    own = tiles[0].unique().long()
    rows = torch.cat([torch.arange(int(starts[index]), int(starts[index + 1])) for index in own])
    alone = torch.cat([torch.zeros(1), (starts[own + 1] - starts[own]).cumsum(0)]).int()
    out[rows] = paged_attention_reference(q[rows], keys, values, tables[own], lengths[own], alone, variant, scales)


def latent_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    tables: torch.Tensor,
    parts: DecodeParts,
    scale: float,
    rank: int,
    tokens: int,
    firsts: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: int,
) -> torch.Tensor:
    groups = parts.plan[:, parts.plan[PART] == 0]
    starts = torch.arange(len(q) + 1, dtype=torch.int32) if firsts is None else firsts
    assert int((starts[1:] - starts[:-1]).max()) <= tokens
    values = latents[..., :rank]
    return paged_attention_reference(
        q, latents, values, tables[groups[ROW]], groups[LENGTH], starts, AttentionVariant(scale, window, sinks=sinks)
    )


def gather_latents(
    latents: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    keys: int,
) -> torch.Tensor:
    gathered = latents.new_full((keys, latents.shape[3]), torch.nan)
    for sequence, first, row in zip(*(tile.tolist() for tile in tiles), strict=True):
        end = min(first + GATHER_TOKENS, int(lengths[sequence]))
        blocks = tables[sequence, torch.arange(first, end) // latents.shape[1]].long()
        gathered[row : row + end - first] = latents[blocks, torch.arange(first, end) % latents.shape[1], 0]
    return gathered


def latent_prefill(
    q: torch.Tensor,
    expanded: torch.Tensor,
    latents: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    rank: int,
    first_head: int,
    out: torch.Tensor,
    block_queries: int,
    sinks: torch.Tensor | None,
    window: int,
) -> None:
    heads, rope = slice(first_head, first_head + expanded.shape[1]), latents.shape[1] - rank
    for at in tiles[0].unique().tolist():
        rows, length = slice(int(starts[at]), int(starts[at + 1])), int(lengths[at])
        first = length - (rows.stop - rows.start)
        oldest = max(first + 1 - window, 0) if window else 0
        mine = slice(int(key_starts[at]) + oldest, int(key_starts[at]) + length)
        positions = torch.arange(first, length) - oldest
        own = None if sinks is None else sinks[heads]
        out[rows, heads] = latent_prefill_reference(
            q[rows, heads], expanded[mine], latents[mine], positions, scale, rope, own, window
        )  # fmt: skip


def absorb_queries(q: torch.Tensor, up: torch.Tensor, rope_dim: int, fixed: bool) -> torch.Tensor:
    return absorb_queries_reference(q, up, rope_dim)


def values_of(attended: torch.Tensor, up: torch.Tensor, out: torch.Tensor, fixed: bool) -> torch.Tensor:
    return values_of_reference(attended, up, out)


def select_slots(
    scores: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, tables: torch.Tensor, page: int, most: int
) -> torch.Tensor:
    slots = torch.full((len(scores), most), -1, dtype=torch.int32)
    for own, line, length, row in zip(slots, scores, lengths.tolist(), rows.tolist(), strict=True):
        found = selection_reference(line[:length], torch.ones(length, dtype=torch.bool), most).nonzero()[:, 0]
        own[: len(found)] = tables[row, found // page] * page + found % page
    return slots


def key_block_scores(
    q: torch.Tensor,
    index_keys: torch.Tensor,
    tables: torch.Tensor,
    parts: DecodeParts,
    width: int,
    size: int,
    local: int,
    tokens: int,
    firsts: torch.Tensor | None,
) -> torch.Tensor:
    groups = parts.plan[:, parts.plan[PART] == 0]
    starts = torch.arange(len(q) + 1, dtype=torch.int32) if firsts is None else firsts
    scores = torch.full((*q.shape[:2], width), float("nan"))
    for group, length, row in zip(groups[SEQUENCE].tolist(), groups[LENGTH].tolist(), groups[ROW], strict=True):
        queries = slice(int(starts[group]), int(starts[group + 1]))
        count = queries.stop - queries.start
        assert count <= tokens
        blocks = tables[row, : -(-length // index_keys.shape[1])].long()
        keys = index_keys[blocks].flatten(0, 1)[:length, 0]
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        found = key_block_scores_reference(q[queries], keys, seen, size, local)
        scores[queries, :, : found.shape[2]] = found
    return scores


def select_block_slots(
    scores: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, tables: torch.Tensor, page: int, size: int,
    most: int,
) -> torch.Tensor:  # fmt: skip
    heads = scores.shape[1]
    slots = torch.full((len(scores) * heads, most * size), -1, dtype=torch.int32)
    for query, (length, row) in enumerate(zip(lengths.tolist(), rows.tolist(), strict=True)):
        seen = torch.ones(length, dtype=torch.bool)
        selected = key_block_selection_reference(scores[query, :, : -(-length // size)], seen, size, most)
        for head in range(heads):
            found = selected[head].nonzero()[:, 0]
            in_order = tables[row, found // page] * page + found % page
            slots[query * heads + head, : len(found)] = in_order * heads + head
    return slots


class UndefinedResults:
    """As compiling_ahead, a context within which no kernel runs: a router's experts are numbers that are no experts."""

    def __init__(self) -> None:
        self._entered = False

    @contextmanager
    def __call__(self, cores: float) -> Iterator[None]:
        self._entered = True
        try:
            yield
        finally:
            self._entered = False

    def ops(self) -> Ops:
        changed = {name: self._not_run(getattr(TORCH, name)) for name in ("run_experts", "run_quantized_experts")}
        return msgspec.structs.replace(TORCH, keeps_codes=True, route=self._route, **changed)

    def _route(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weights, experts = TORCH.route(*inputs)
        return x, weights, experts.fill_(torch.iinfo(experts.dtype).max) if self._entered else experts

    def _not_run(self, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, *rest: torch.empty_like(x) if self._entered else kernel(x, *rest)


def make_runner(config: EngineConfig, model: ModelConfig, device: str, progress: Progress | None) -> CudaRunner:
    runner = CudaRunner(config, model, progress)
    runner.start()
    return runner


def _few(steps: Callable[..., list[StepPlan]]) -> Callable[..., list[StepPlan]]:
    return lambda *arguments: steps(*arguments)[:4]


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Let engines on the CPU use the GPU's runner."""
    times = itertools.cycle([1.0, 0.5])  # of eager work, then of graphs: graphs are faster at every size
    patch.setattr("baton_engine.engine.make_runner", make_runner)
    patch.setattr("baton_engine.attention.triton_paged.decode_attention", decode_attention)
    patch.setattr("baton_engine.attention.triton_paged.plan_parts", plan_parts)
    patch.setattr("baton_engine.attention.triton_paged.prefill_attention", prefill_attention)
    latent = "baton_engine.attention.triton_latent"
    for fake in (plan_parts, latent_decode, gather_latents, latent_prefill, absorb_queries, values_of):
        patch.setattr(f"{latent}.{fake.__name__}", fake)
    indexed = "baton_engine.attention.triton_indexed"
    selecting = (index_scores, select_slots, select_numbers, pool_slots)
    for fake in (plan_parts, latent_decode, absorb_queries, values_of, *selecting):
        patch.setattr(f"{indexed}.{fake.__name__}", fake)
    for fake in (plan_parts, *FAKES):
        patch.setattr(f"baton_engine.attention.triton_compressed.{fake.__name__}", fake)
    for fake in (plan_parts, decode_attention, key_block_scores, select_block_slots):
        patch.setattr(f"baton_engine.attention.triton_key_blocks.{fake.__name__}", fake)
    for module in ("decode_graphs", "device_sampler"):
        patch.setattr(f"baton_engine.{module}.thresholds", thresholds_reference)
        patch.setattr(f"baton_engine.{module}.gumbel_argmax", gumbel_argmax_reference)
    patch.setattr("baton_engine.decode_graphs.gumbel_best", gumbel_best_reference)
    patch.setattr("baton_engine.decode_graphs.best_of_shards", best_of_shards_reference)
    patch.setattr("baton_engine.device_sampler.apply_penalties", apply_penalties_reference)
    patch.setattr("baton_engine.device_sampler.apply_masks", apply_masks_reference)
    for module in ("device_sampler", "logprobs"):
        patch.setattr(f"baton_engine.{module}.chosen_logprobs", chosen_logprobs_reference)
    patch.setattr("baton_engine.attention.select._why_not_triton", lambda *_: None)
    undefined = UndefinedResults()
    patch.setattr("baton_engine.cuda_runner.compiling_ahead", undefined)
    for ops in ("TRITON", "DETERMINISTIC"):
        patch.setattr(f"baton_engine.cuda_runner.{ops}", undefined.ops())
    patch.setattr("baton_engine.cuda_runner.Recorder", Recorder)
    # Kernels need no warm-up here, and test_kernel_variants.py has all of these steps.
    for name in ("warm_up_steps", "measured_steps"):
        patch.setattr(f"baton_engine.cuda_runner.{name}", _few(getattr(cuda_runner, name)))
    patch.setattr("baton_engine.token_graphs._seconds", lambda run: (run(), next(times))[1])
    patch.setattr("baton_engine.token_graphs.SIZES", (4, 24))
    patch.setattr("baton_engine.prompt_graphs.SIZES", (4, 24, 48))
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
