"""Runs the model over a step: token ids in, sampled tokens and logprobs out."""

import logging
import os
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from .attention.backend import AttentionBatch
from .attention.select import select_backend
from .config import ConfigError, EngineConfig
from .kv_cache import KvCache
from .loading import Progress, Weights, check_tokenizer
from .model_config import ModelConfig
from .models.decoder import Decoder
from .sampler import Draw, sample, token_logprobs
from .sampling import TokenLogprobs
from .sequence import Step
from .transfer import to_device

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_KV_BYTES = 1 << 30
_PROMPT_LOGPROB_ROWS = 64
PENDING_TOKEN = -1


class Choice(msgspec.Struct):
    """A sampled token and, when asked for, its logprobs."""

    token: int
    logprobs: TokenLogprobs | None


class Launched(Protocol):
    """A step that is under way."""

    def wait(self) -> list[list[Choice]]:
        """Return for each sequence of the step its new choices: none when its last token is not computed yet, one
        normally, one per choice of the request when these are still to fork."""


class Done(msgspec.Struct):
    """A step that was over when it was launched."""

    results: list[list[Choice]]

    def wait(self) -> list[list[Choice]]:
        return self.results


class Runner:
    """The model, its KV cache and its attention backend on one device."""

    depth = 0  # steps that may be launched before the oldest is waited for

    def __init__(self, config: EngineConfig, model: ModelConfig, progress: Progress | None = None) -> None:
        device = find_device(config.device)
        dtype = _dtype(config.dtype, model.dtype, device)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        self.model = model
        self.device = device
        self.max_model_len = config.max_model_len or model.max_position_embeddings
        if self.max_model_len > model.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} is more than the {model.max_position_embeddings} positions "
                "that the model was made for"
            )
        folder = Path(config.model)
        check_tokenizer(folder, model.vocab_size)
        self._block_size = config.block_size
        self.cache = _allocate_cache(config, model, self.max_model_len, dtype, device)
        backend = select_backend(config.attention_backend, model, self.cache, device)
        with Weights(folder, dtype, device, progress) as weights:
            self._decoder = Decoder(model, weights, backend, self.cache, self.max_model_len)
        self._backend = backend

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Start to compute a step whose input tokens are all known."""
        self.cache.copy(step.copies)
        token_ids, positions, batch = self._inputs(step)
        self._backend.prepare(batch)
        hidden = self._decoder.forward(token_ids, positions, batch)
        self._prompt_logprobs(step, batch, hidden)
        return Done(self._sample(step, batch, hidden))

    def _inputs(self, step: Step) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        token_ids: list[int] = []
        positions, slots = [], []
        starts = [0]
        size = self._block_size
        offsets = np.arange(size)
        for sequence, count, end in step:
            first = end - count
            token_ids += sequence.tokens[first:end]
            token_ids += [PENDING_TOKEN] * (starts[-1] + count - len(token_ids))
            positions.append(np.arange(first, end))
            blocks = np.array(sequence.blocks[first // size : (end - 1) // size + 1])
            slots.append((blocks[:, None] * size + offsets).ravel()[first % size : first % size + count])
            starts.append(len(token_ids))
        tables = [sequence.blocks for sequence in step.sequences]
        ids = to_device(token_ids, self.device)
        where, at = (to_device(np.concatenate(parts), self.device) for parts in (positions, slots))
        return ids, where, AttentionBatch(starts, step.ends, tables, at)

    def _sample(self, step: Step, batch: AttentionBatch, hidden: torch.Tensor) -> list[list[Choice]]:
        draws: list[Draw] = []
        rows: list[int] = []
        ready: list[int] = []
        for index, (sequence, _, _) in enumerate(step):
            if not step.samples[index]:
                continue
            choices = range(sequence.sampling.n) if sequence.output_len == 0 else [sequence.choice]
            draws += [Draw(sequence.sampling, sequence.tokens, sequence.prompt_len, len(rows), c) for c in choices]
            rows.append(batch.starts[index + 1] - 1)
            ready.append(index)
        results: list[list[Choice]] = [[] for _ in step.sequences]
        if not rows:
            return results
        logits = self._decoder.logits(hidden[rows]).float()
        tokens = sample(logits, draws)
        wanted = [(draw, token) for draw, token in zip(draws, tokens, strict=True) if draw.params.logprobs is not None]
        logprobs = iter(
            token_logprobs(
                logits[[draw.row for draw, _ in wanted]],
                [token for _, token in wanted],
                [draw.params.logprobs or 0 for draw, _ in wanted],
            )
        )
        for draw, token in zip(draws, tokens, strict=True):
            choice = Choice(token, next(logprobs) if draw.params.logprobs is not None else None)
            results[ready[draw.row]].append(choice)
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
            for at in range(max(done, 0), len(targets), _PROMPT_LOGPROB_ROWS):
                part = targets[at : at + _PROMPT_LOGPROB_ROWS]
                logits = self._decoder.logits(hidden[start + at : start + at + len(part)]).float()
                sequence.prompt_logprobs += token_logprobs(logits, part, [wanted] * len(part))


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


def _allocate_cache(
    config: EngineConfig, model: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> KvCache:
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    least = -(-max_model_len // config.block_size)
    num_blocks = config.num_blocks
    if num_blocks is None:
        wanted = max(_DEFAULT_KV_BYTES // (per_token * config.block_size), least)
        num_blocks = min(wanted, least * config.max_num_seqs)
    if num_blocks < least:
        raise ConfigError(
            f"{num_blocks} blocks of {config.block_size} tokens hold {num_blocks * config.block_size}, less than one "
            f"sequence of {max_model_len}: raise --num-blocks to {least} or lower --max-model-len"
        )
    log.info(
        "KV cache: %d blocks of %d tokens, %.1f MiB", num_blocks, config.block_size,
        num_blocks * config.block_size * per_token / 2**20,
    )  # fmt: skip
    return KvCache(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        device=device,
    )
