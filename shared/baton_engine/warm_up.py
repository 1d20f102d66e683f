"""The steps that an engine runs before it serves, so that nothing is compiled or loaded while requests wait.

A kernel is compiled for each set of compile-time values. These depend on the model and on the size classes of a step
(baton_kernels/size_class.py), so one step of each class is enough.
"""

import msgspec

from .config import EngineConfig
from .largest_steps import PLAIN, plan_of
from .step_plan import StepPlan

# Latent attention computes a chunk of a long sequence in the cheaper one of two ways. The number of tokens from which
# the other way is cheaper is below this one, and may lie within a class.
_LARGEST_OF_TWO_WAYS = 256
_DECODED = 64  # tokens of a sequence that decodes
_MOST_LOGPROBS = 64  # rows of logits that prompt logprobs take at a time
_SCORED = msgspec.structs.replace(PLAIN, prompt_logprobs=1)


def warm_up_steps(config: EngineConfig, lengths: list[int], num_groups: int = 1) -> list[StepPlan]:
    """Return steps of each class of sizes that the settings allow. All their sequences use block 0 only.

    lengths: as ModelConfig.attention_lengths returns them. num_groups: groups of layers, which have block tables of
    their own.
    """
    tokens, sequences, max_model_len = config.max_num_batched_tokens, config.max_num_seqs, lengths[-1]
    longest = min(tokens, max_model_len)
    steps = []
    # Prompts alone, as few as possible.
    for size in classes(tokens):
        prompts = [longest] * (size // longest) + [size % longest] * (size % longest > 0)
        if len(prompts) <= sequences:
            steps.append([(length, length) for length in prompts])
    # The last chunk of a long sequence: the largest and the smallest of each class.
    for length in lengths:
        for size in classes(min(longest, length, _LARGEST_OF_TWO_WAYS)):
            steps += [[(count, length)] for count in {size, size // 2 + 1}]
    # Decodes, beside a chunk where there is room for one: then no graph holds the whole step. The chunk belongs to a
    # long sequence, whose keys attention divides among programs.
    for size in classes(min(sequences, tokens)):
        chunk = min(2, tokens - size, max_model_len) if size < sequences else 0
        steps.append([(1, min(_DECODED, max_model_len))] * size + [(chunk, max_model_len)] * (chunk > 1))
    plans = [plan_of(config, num_groups, parts, [PLAIN] * len(parts)) for parts in steps]
    scored = [[(size + 1, size + 1)] for size in classes(min(longest - 1, _MOST_LOGPROBS))]
    return plans + [plan_of(config, num_groups, parts, [_SCORED]) for parts in scored]


def classes(most: int) -> list[int]:
    """Return the largest number of each class up to `most`: the powers of two, and `most`."""
    sizes = [1 << exponent for exponent in range(max(most, 0).bit_length()) if 1 << exponent < most]
    return sizes + [most] * (most > 0)
