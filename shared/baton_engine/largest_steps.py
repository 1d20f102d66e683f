"""The steps that take the most memory under the given settings. The engine sets their peak memory aside at start."""

import msgspec
import numpy as np

from .config import EngineConfig
from .sampling import Grammar, GrammarKind, SamplingParams
from .step_plan import NewRow, StepPlan

_SHORT_CHUNK = 96
PLAIN = SamplingParams(max_tokens=2, temperature=1.0)
# All parameters that make a draw copy its logits, except a grammar.
_EVERYTHING = SamplingParams(
    max_tokens=2,
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    bad_words=[[0, 0]],
    logprobs=20,
)
_MASKED = msgspec.structs.replace(_EVERYTHING, prompt_logprobs=20, grammar=Grammar(GrammarKind.JSON_OBJECT, ""))
# These draws do not edit logits. Beside _EVERYTHING in one step they form a second group, whose logits are copied too.
_UNEDITED = SamplingParams(max_tokens=2, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=20)


def forward_steps(config: EngineConfig, lengths: list[int], num_groups: int = 1) -> list[StepPlan]:
    """Return the largest steps of few sequences: whole prompts, and the last chunk of a sequence of full length.

    A short chunk of such a sequence comes after them: attention may compute it in another way than a long one. All
    their sequences use block 0 only. lengths: as ModelConfig.attention_lengths returns them; each has such steps.
    num_groups: groups of layers, which have block tables of their own.
    """
    plans = []
    for longest in lengths:
        prompts = _split(config.max_num_batched_tokens, config.max_num_seqs, longest, fewest=True)
        chunk = min(config.max_num_batched_tokens, longest)
        plans += [
            plan_of(config, num_groups, [(count, count) for count in prompts], [PLAIN] * len(prompts)),
            plan_of(config, num_groups, [(chunk, longest)], [PLAIN]),
            plan_of(config, num_groups, [(min(_SHORT_CHUNK, chunk), longest)], [PLAIN]),
        ]
    return plans


def sampling_steps(config: EngineConfig, max_model_len: int, num_groups: int = 1) -> list[StepPlan]:
    """Return the largest steps of as many sequences as can run: prompts, then decodes, with each kind of draw."""
    prompts = _split(config.max_num_batched_tokens, config.max_num_seqs, max_model_len, fewest=False)
    chunks = [(count, count) for count in prompts]
    decodes = [(1, max_model_len)] * len(prompts)
    steps = []
    for part in (chunks, decodes):
        steps += [plan_of(config, num_groups, part, [kind] * len(part)) for kind in (PLAIN, _EVERYTHING, _MASKED)]
        steps.append(plan_of(config, num_groups, part, [_EVERYTHING, *[_UNEDITED] * (len(part) - 1)]))
    return steps


def _split(tokens: int, sequences: int, longest: int, fewest: bool) -> list[int]:
    """Return the lengths of prompts that have `tokens` tokens together, or as many as `sequences` prompts can have.

    fewest: with as few prompts as possible, else with as many as possible.
    """
    if not fewest:
        sequences = min(sequences, tokens)
        longest = min(longest, -(-tokens // sequences))
    lengths: list[int] = []
    while tokens and len(lengths) < sequences:
        # At least one token is left for each of the sequences that follow.
        lengths.append(min(longest, tokens if fewest else tokens - (sequences - len(lengths) - 1)))
        tokens -= lengths[-1]
    return lengths


def plan_of(
    config: EngineConfig, num_groups: int, parts: list[tuple[int, int]], kinds: list[SamplingParams]
) -> StepPlan:
    """Return a step of new rows, all of which use block 0 only.

    parts: (tokens to compute, tokens in all) of each row. kinds: the sampling parameters of each row."""
    plan = StepPlan()
    prompt = [0] * max(length for _, length in parts)
    for row, ((count, length), sampling) in enumerate(zip(parts, kinds, strict=True)):
        tokens = prompt if length == len(prompt) else prompt[:length]
        blocks = np.zeros((num_groups, -(-length // config.block_size)), dtype=np.int32)
        plan.new_rows.append(
            NewRow(row=row, prompt=tokens, output=[], blocks=blocks, sampling=sampling, choice=0)
        )  # fmt: skip
        plan.put(row, count, length, 1)
        if sampling.grammar is not None:
            plan.masked.append(row)
        if sampling.prompt_logprobs is not None and count > 1:
            plan.prompt_logprobs.append((row, length - count + 1))
    return plan
