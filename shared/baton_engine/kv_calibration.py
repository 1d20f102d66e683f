"""Measures how large the keys and values of a model are, by a pass over some tokens whose KV is not quantized."""

import contextlib
from pathlib import Path

import numpy as np
import torch

from baton_tokenizer.errors import NoTokenizerError
from baton_tokenizer.load import load_tokenizer

from .attention.backend import AttentionBackend, AttentionBatch, StepLimits
from .calibration_text import TEXT
from .config import ConfigError
from .context import Context, Tokens
from .kv_cache import KvCache
from .model_config import ModelConfig
from .models.model import Model
from .ops import Ops
from .stage import WHOLE, Stage
from .transfer import to_device

# Pods with different settings must measure the same scales, so none of this depends on settings.
_TOKENS = 512  # at most, of each prompt
_BLOCK_SIZE = 64


def calibration_prompts(folder: Path, vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Return a text, if the model's folder has a tokenizer, and random tokens."""
    most = min(_TOKENS, max_model_len)
    prompts = [np.random.default_rng(0).integers(vocab_size, size=most).tolist()]
    # An unusable tokenizer has already been an error earlier in the start.
    with contextlib.suppress(NoTokenizerError):
        prompts.insert(0, load_tokenizer(folder).encode(TEXT).ids[:most])
    return [prompt for prompt in prompts if prompt]


@torch.inference_mode()
def largest_kv(
    model: Model,
    config: ModelConfig,
    backend: type[AttentionBackend],
    prompts: list[list[int]],
    device: torch.device,
    ops: Ops,
    stage: Stage = WHOLE,
) -> list[torch.Tensor]:
    """Return for each layer of a stage the largest magnitudes of each head's keys, then of its values, [2, kv_heads]
    float32.

    backend: attends while the KV is not quantized. Raises ConfigError when a key or a value is not finite.
    """
    layout = config.kv_layout(str(model.dtype).removeprefix("torch."))
    cache = KvCache(layout, _BLOCK_SIZE, device, ops, layers=stage.layers(config.kv_layers, layout.stage_starts))
    longest, groups = max(map(len, prompts)), len(layout.groups)
    # The tables of each group are aligned to 16 bytes, as in the row table.
    width = -(-longest // (4 * _BLOCK_SIZE)) * 4
    cache.allocate(len(prompts) * groups * width)
    tables = np.arange(cache.num_blocks, dtype=np.int32).reshape(len(prompts), groups, width)
    attention = backend(cache, config.num_heads, config.attention, StepLimits(1, longest))
    for prompt, table in zip(prompts, tables, strict=True):
        count = len(prompt)
        positions = np.arange(count)
        slots = table[:, positions // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + positions % _BLOCK_SIZE
        attention.prepare(AttentionBatch([0, count], [count], table[None]))
        inputs = to_device(np.stack([np.array(prompt), positions, *slots]), device)
        received = None
        if not stage.is_first:
            received = torch.empty(count, config.stream_size, dtype=model.dtype, device=device)
            stage.receive(received)
        hidden = model(Context(Tokens(inputs[0], inputs[1], inputs[2:]), cache, attention, received=received))
        if not stage.is_last:
            stage.send(hidden)
    found = []
    for layer in cache.layers:
        # Slots without a token are 0.
        blocks = to_device(tables[:, cache.group_of(layer)].ravel(), device)
        largest = torch.stack([plane[blocks].abs().amax(dim=(0, 1, 3)).float() for plane in cache.layer(layer)])
        if not bool(largest.isfinite().all()):
            raise ConfigError(
                f"keys or values of layer {layer} are not finite, so that there are no scales for them in FP8: use "
                "--kv-cache-dtype auto"
            )
        found.append(largest)
    return found
