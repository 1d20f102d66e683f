"""Runs the model over a step: token ids in, sampled tokens and logprobs out."""

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from baton_common.cores import available_cores
from baton_kernels.reference.sampling import NOT_FINITE

from .attention.backend import AttentionBackend, AttentionBatch
from .attention.select import select_backend
from .attention.torch_sdpa import TorchSdpa
from .config import ConfigError, EngineConfig
from .context import Context, Tokens
from .kv_cache import KvCache
from .largest_steps import forward_steps, sampling_steps
from .loading import Progress, Weights, check_tokenizer, weights_bytes
from .memory import (
    Budget,
    KvShape,
    check_num_blocks,
    check_weights,
    choose_num_blocks,
    gib,
    log_memory,
    measure,
    memory_of,
    unmeasured,
)
from .model_config import ModelConfig
from .models.registry import model_class
from .ops import TORCH, Ops
from .sampler import Draw, sample, token_logprobs
from .sampling import TokenLogprobs
from .sequence import Step
from .source import Source
from .threads import Threads, choose_threads
from .transfer import to_device

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Bounds the memory of float32 copies of logits.
_FLOAT_ROWS = 64


class Choice(msgspec.Struct, gc=False):
    """A sampled token and, when asked for, its logprobs; the token is NOT_FINITE where the model's numbers were not."""

    token: int
    logprobs: TokenLogprobs | None


class Launched(Protocol):
    """A step that is under way."""

    def wait(self) -> list[list[Choice]]:
        """Return for each sequence of the step its new choices: none when its last token is not computed yet, one
        normally, one per choice of the request when these are still to fork. A sequence whose numbers were not finite
        has a choice of NOT_FINITE in any case."""

    def done(self) -> bool:
        """Whether `wait` returns at once."""

    def layers_done(self) -> int:
        """Return of how many layers the KV is complete, as far as that is known before all are."""


class Fence(Protocol):
    """All that was launched before some moment."""

    def wait(self) -> None:
        """Let what is launched from now on into the current stream begin after it."""


class Done(msgspec.Struct):
    """A step that was over when it was launched."""

    results: list[list[Choice]]

    def done(self) -> bool:
        return True

    def layers_done(self) -> int:
        return 0

    def wait(self) -> list[list[Choice]]:
        return self.results


class Runner:
    """The model, its KV cache and its attention backend on one device."""

    depth = 0  # steps that may be launched before the oldest is waited for
    prefill_rate = 0.0  # tokens a second, measured at start; 0 = not measured
    threads: Threads | None = None  # that compute; None on a GPU

    def __init__(self, config: EngineConfig, model: ModelConfig, progress: Progress | None = None) -> None:
        device = find_device(config.device)
        dtype = _dtype(config.dtype, model.dtype, device)
        if device.type == "cpu":
            self.threads = choose_threads(config, model, available_cores(), os.environ)
            torch.set_num_threads(self.threads.count)
            log.info("threads: %s", self.threads)
        self.model = model
        self.device = device
        self.dtype = dtype  # of weights and of what is computed
        self.max_model_len = config.max_model_len or model.max_position_embeddings
        if self.max_model_len > model.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} is more than the {model.max_position_embeddings} positions "
                "that the model was made for"
            )
        folder = Path(config.model)
        check_tokenizer(folder, model.vocab_size)
        self._config = config
        self._block_size = config.block_size
        layout = model.kv_layout(str(dtype).removeprefix("torch."))
        self.cache = KvCache(layout, config.block_size, device, self._ops)
        self._shape = KvShape(self.cache.block_bytes, config.block_size, self.max_model_len)
        check_num_blocks(config.num_blocks, self._shape)
        self._memory = memory_of(device)
        self._share = int(self._memory.total() * (config.gpu_memory_utilization if self._memory.measured else 1))
        self._backend = self._make_backend(
            select_backend(config.attention_backend, model, device, config.deterministic)
        )
        unused = frozenset({"lm_head.weight"}) if model.tie_word_embeddings else frozenset[str]()
        self._weights_bytes = weights_bytes(folder, dtype, unused)
        check_weights(self._weights_bytes, self._memory, self._share, str(dtype).removeprefix("torch."))
        with Weights(folder, dtype, device, progress) as weights, self._enough_for("the weights", self._weights_bytes):
            self._model = model_class(model.architecture)(model, Source(weights, self._ops), self.max_model_len)

    def start(self) -> None:
        """Set aside all the memory that steps need, and give the rest to the KV cache. Once, before the first launch.

        Raises ConfigError when that is too little for one sequence of the longest length.
        """
        budget = self._budget()
        num_blocks = choose_num_blocks(budget, self._shape, self._config, self._memory.measured)
        with self._enough_for("the KV cache", num_blocks * self._shape.block_bytes):
            self.cache.allocate(num_blocks)
        log_memory(budget, self._shape, num_blocks)
        before = self._memory.held()
        with self._enough_for("CUDA graphs", budget.graphs):
            self._record_graphs()
        taken = self._memory.held() - before
        if taken > budget.graphs > 0:
            log.warning("CUDA graphs took %s GiB, %s were set aside for them", gib(taken), gib(budget.graphs))

    @property
    def _ops(self) -> Ops:
        return TORCH

    def _make_backend(self, name: str) -> AttentionBackend:
        """Return the attention backend that was selected for this model and device."""
        return TorchSdpa(self.cache, self.model.num_heads, self.model.attention)

    @property
    def _graphs_bytes(self) -> int:
        """What `_record_graphs` will allocate."""
        return 0

    def _record_graphs(self) -> None:
        """Prepare what needs the KV cache where it will stay."""

    def _budget(self) -> Budget:
        if not self._memory.measured:
            return unmeasured(self._memory, self._weights_bytes)
        # One block is enough, as the sequences of the largest steps share it.
        self.cache.allocate(1)
        config = self._config
        few, many = (steps(config, self.max_model_len) for steps in (forward_steps, sampling_steps))
        run = self._run_to_measure
        graphs, pairs = self._graphs_bytes, config.set_aside_bytes
        budget = measure(self._memory, self._share, graphs, lambda: run(few), lambda: run(many), pairs)
        self.cache.allocate(0)
        return budget

    @contextmanager
    def _enough_for(self, what: str, size: int) -> Iterator[None]:
        """Explain that memory runs out although there was enough: another process has been faster."""
        try:
            yield
        except torch.OutOfMemoryError:
            name, free = self._memory.name, self._memory.free()
            raise ConfigError(
                f"{what} of {gib(size)} GiB found too little memory on {name}: {gib(free)} GiB are free. Does another "
                "process use it, too?"
            ) from None

    def _run_to_measure(self, steps: list[Step]) -> None:
        try:
            for step in steps:
                self.launch(step).wait()
        except torch.OutOfMemoryError:
            config, memory = self._config, self._memory
            raise ConfigError(
                f"a step of {config.max_num_batched_tokens} tokens and {config.max_num_seqs} sequences needs more than "
                f"the {gib(memory.free())} GiB that are free on {memory.name} beside the weights: lower "
                "--max-num-batched-tokens or --max-num-seqs"
            ) from None

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Start to compute a step whose input tokens are all known."""
        self.cache.copy(step.copies)
        packed = np.empty((3, step.num_tokens), dtype=np.int64)
        batch = self._pack(step, packed)
        self._backend.prepare(batch)
        hidden = self._model(self._context(Tokens(*to_device(packed, self.device))))
        self._prompt_logprobs(step, batch, hidden)
        results = self._sample(step, batch, hidden)
        if has_chunks(step):
            mark_broken(results, batch.starts, row_sums(hidden).tolist())
        return Done(results)

    def _context(self, tokens: Tokens, written: Callable[[int], None] | None = None) -> Context:
        return Context(tokens, self.cache, self._backend, written)

    def fence(self) -> Fence | None:
        """Return what separates the steps launched so far from other streams' work; None where there are no others."""
        return None

    def _pack(self, step: Step, out: np.ndarray) -> AttentionBatch:
        """Fill out [3, at least the step's tokens] int64 with token ids, positions and slots, as Tokens has them.

        A token that is sampled but not read yet is -1 - row of its sequence.
        """
        starts = [0]
        size = self._block_size
        offsets = np.arange(size)
        for sequence, count, end in step:
            first, start = end - count, starts[-1]
            stop = start + count
            known = sequence.tokens(first, end)
            out[0, start : start + len(known)] = known
            out[0, start + len(known) : stop] = -1 - sequence.row
            if count == 1:
                out[1, start] = first
                out[2, start] = sequence.blocks[first // size] * size + first % size
            else:
                out[1, start:stop] = np.arange(first, end)
                blocks = np.array(sequence.blocks[first // size : (end - 1) // size + 1])
                out[2, start:stop] = (blocks[:, None] * size + offsets).ravel()[first % size : first % size + count]
            starts.append(stop)
        return AttentionBatch(starts, step.ends, [sequence.blocks for sequence in step.sequences])

    def _sample(self, step: Step, batch: AttentionBatch, hidden: torch.Tensor) -> list[list[Choice]]:
        draws: list[Draw] = []
        rows: list[int] = []
        owners: list[int] = []
        for index, (sequence, _, _) in enumerate(step):
            if not step.samples[index]:
                continue
            choices = sequence.choices
            draws += [
                Draw(sequence.sampling, sequence.prompt, sequence.output, len(rows), choice, sequence.matcher)
                for choice in choices
            ]
            rows.append(batch.starts[index + 1] - 1)
            owners += [index] * len(choices)
        results: list[list[Choice]] = [[] for _ in step.sequences]
        if not rows:
            return results
        logits = self._model.logits(hidden[rows])
        for at in range(0, len(draws), _FLOAT_ROWS):
            part = slice(at, at + _FLOAT_ROWS)
            for index, choice in zip(owners[part], _choose(logits, draws[part]), strict=True):
                results[index].append(choice)
        return results

    def _prompt_logprobs(self, step: Step, batch: AttentionBatch, hidden: torch.Tensor) -> None:
        """Extend `prompt_logprobs` of the sequences that want them by this chunk's part of the prompt."""
        for (sequence, count, end), start in zip(step, batch.starts, strict=False):
            wanted = sequence.sampling.prompt_logprobs
            if wanted is None or sequence.output_len:
                continue
            first = end - count
            # The logits at one position judge the token at the next.
            targets = sequence.request.prompt[first + 1 : end + 1]
            done = len(sequence.prompt_logprobs) - first
            for at in range(max(done, 0), len(targets), _FLOAT_ROWS):
                part = targets[at : at + _FLOAT_ROWS]
                logits = self._model.logits(hidden[start + at : start + at + len(part)]).float()
                sequence.prompt_logprobs += token_logprobs(logits, part, [wanted] * len(part))


def has_chunks(step: Step) -> bool:
    """Whether a step computes several tokens of a sequence, not all of which lead to logits that show a NaN."""
    return step.num_tokens > len(step.sequences)


def row_sums(hidden: torch.Tensor) -> torch.Tensor:
    """Return a number for each token's hidden state [T, hidden] that is finite only where all of the state is."""
    return hidden.sum(dim=-1, dtype=torch.float32)


def mark_broken(results: list[list[Choice]], starts: list[int], sums: list[float]) -> None:
    """Put NOT_FINITE in place of the choices of each sequence that computed something not finite.

    starts: where each sequence's tokens begin, as AttentionBatch has it. sums: `row_sums` of at least these tokens.
    """
    if all(map(math.isfinite, sums[: starts[-1]])):
        return
    for index, (first, end) in enumerate(itertools.pairwise(starts)):
        if not all(map(math.isfinite, sums[first:end])):
            results[index] = [Choice(NOT_FINITE, None)]


def _choose(logits: torch.Tensor, draws: list[Draw]) -> list[Choice]:
    """logits: [R, vocab]. Returns what is drawn; the draws are in the order of their rows."""
    first = draws[0].row
    rows = logits[first : draws[-1].row + 1].float()
    for draw in draws:
        draw.row -= first
    tokens = sample(rows, draws)
    wanted = [(draw, token) for draw, token in zip(draws, tokens, strict=True) if draw.params.logprobs is not None]
    logprobs = iter(
        token_logprobs(
            rows[[draw.row for draw, _ in wanted]],
            [token for _, token in wanted],
            [draw.params.logprobs or 0 for draw, _ in wanted],
        )
    )
    return [
        Choice(token, next(logprobs) if draw.params.logprobs is not None else None)
        for draw, token in zip(draws, tokens, strict=True)
    ]


def find_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name!r}: this machine has no CUDA device that torch can use")
    return device


def _dtype(asked: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """auto is float32 on CPU, where half precision is slower, and the checkpoint's own elsewhere."""
    name = asked
    if asked == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name!r} is unknown; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
