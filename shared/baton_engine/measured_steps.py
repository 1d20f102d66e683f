"""The steps whose times an engine measures at start in order to predict the times of all others."""

import numpy as np

from .config import EngineConfig
from .largest_steps import PLAIN, plan_of
from .step_plan import StepPlan

# Shorter prompts are bound by reading the weights, unlike the long steps whose prediction bounds chunks.
_PROMPTS = (512, 2048)
_CHUNK = 1024  # of long sequences: about as many tokens as chunks have in service, as few use a device less well
_FEW, _MANY = 8, 64
_SHORT, _MIDDLE, _LONG = 64, 4096, 32_768
# Numbers of tokens up to the largest CUDA graph. They are so far apart that all of them together take about a second
# for a model of 8 billion weights.
_SIZES = range(512, 4097, 128)
# The most tokens that the decodes of a measured step read. Steps that read more would only make the start longer.
_MOST_KEYS = 1 << 20


def measured_steps(config: EngineConfig, max_model_len: int, num_groups: int, num_blocks: int) -> list[StepPlan]:
    """Return steps of prompts, of decodes and of both, with short and long contexts, each twice.

    The first run of a step may still load kernels. Sequences use different blocks as far as possible, since a device
    reads one block repeatedly faster than many.
    """
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
    longest = min(tokens, max_model_len)
    prompts = sorted({min(size, longest) for size in (*_PROMPTS, longest)} - {1})
    steps = [[(size, size)] for size in prompts]
    contexts = sorted({min(size, max_model_len) for size in (_MIDDLE, _LONG, max_model_len)})
    steps += [[(min(_CHUNK, longest), context)] for context in contexts if context > 1]
    for count in sorted({1, min(_FEW, sequences), min(_MANY, sequences), sequences}):
        if count <= tokens:
            lengths = {min(size, max_model_len) for size in (_SHORT, _MIDDLE, _LONG, max_model_len)}
            steps += [[(1, length)] * count for length in sorted(lengths) if count * length <= _MOST_KEYS or count == 1]
    beside = min(_MANY, sequences - 1, tokens - 2)
    if beside > 0 and longest > 1:
        chunk = min(_CHUNK, tokens - beside, longest)
        steps += [[(1, min(length, max_model_len))] * beside + [(chunk, chunk)] for length in (_SHORT, _MIDDLE)]
    plans = []
    for parts in steps:
        plans += [_spread(plan_of(config, num_groups, parts, [PLAIN] * len(parts)), num_blocks) for _ in range(2)]
    return plans


def sized_steps(config: EngineConfig, max_model_len: int, num_groups: int, num_blocks: int) -> list[StepPlan]:
    """Return steps of a decode and prompts, which differ in their numbers of tokens."""
    longest, plans = min(_CHUNK, max_model_len), []
    for size in _SIZES:
        prompts, rest = divmod(size - 1, longest)
        chunks = [longest] * prompts + ([rest] if rest else [])
        if size <= config.max_num_batched_tokens and len(chunks) < config.max_num_seqs:
            parts = [(count, count) for count in (1, *chunks)]
            plans.append(_spread(plan_of(config, num_groups, parts, [PLAIN] * len(parts)), num_blocks))
    return plans


def _spread(plan: StepPlan, num_blocks: int) -> StepPlan:
    """Give the sequences of a plan blocks one after another."""
    first = 0
    for new in plan.new_rows:
        count = new.blocks.shape[1]
        new.blocks[:] = (first + np.arange(count)) % num_blocks
        first += count
    return plan
