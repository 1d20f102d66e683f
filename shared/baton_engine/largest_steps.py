"""The steps that take the most memory of all that an engine can be asked for: what they hold at most is set aside."""

import msgspec

from .config import EngineConfig
from .sampling import SamplingParams
from .sequence import Request, Sequence, Step

_PLAIN = SamplingParams(max_tokens=2, temperature=1.0)
# Everything at once that makes a draw take copies of its logits, but for what needs the host.
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
# On a GPU another sampler draws for these, after the logits have been to the host.
_ON_THE_HOST = msgspec.structs.replace(_EVERYTHING, prompt_logprobs=20)
# Drawn without edits beside _EVERYTHING, it is in another group, whose logits are copied.
_UNEDITED = SamplingParams(max_tokens=2, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=20)


def forward_steps(config: EngineConfig, max_model_len: int) -> list[Step]:
    """Return the largest steps of few sequences: whole prompts, and the last chunk of a sequence of full length.

    Their sequences all lie in block 0.
    """
    prompts = _split(config.max_num_batched_tokens, config.max_num_seqs, max_model_len, fewest=True)
    chunk = min(config.max_num_batched_tokens, max_model_len)
    return [
        _step(config, [(count, count) for count in prompts], [_PLAIN] * len(prompts)),
        _step(config, [(chunk, max_model_len)], [_PLAIN]),
    ]


def sampling_steps(config: EngineConfig, max_model_len: int) -> list[Step]:
    """Return the largest steps of as many sequences as can run: prompts, then decodes, with each kind of draw."""
    prompts = _split(config.max_num_batched_tokens, config.max_num_seqs, max_model_len, fewest=False)
    chunks = [(count, count) for count in prompts]
    decodes = [(1, max_model_len)] * len(prompts)
    steps = []
    for part in (chunks, decodes):
        steps += [_step(config, part, [kind] * len(part)) for kind in (_PLAIN, _EVERYTHING, _ON_THE_HOST)]
        steps.append(_step(config, part, [_EVERYTHING, *[_UNEDITED] * (len(part) - 1)]))
    return steps


def _split(tokens: int, sequences: int, longest: int, fewest: bool) -> list[int]:
    """Return the lengths of prompts that have so many tokens together, as far as that many sequences can."""
    if not fewest:
        sequences = min(sequences, tokens)
        longest = min(longest, -(-tokens // sequences))
    lengths: list[int] = []
    while tokens and len(lengths) < sequences:
        # One token for each that is still to come.
        lengths.append(min(longest, tokens if fewest else tokens - (sequences - len(lengths) - 1)))
        tokens -= lengths[-1]
    return lengths


def _step(config: EngineConfig, parts: list[tuple[int, int]], kinds: list[SamplingParams]) -> Step:
    """parts: (tokens to compute, tokens in all) of each sequence. kinds: how each is drawn."""
    step = Step()
    for row, ((count, length), sampling) in enumerate(zip(parts, kinds, strict=True)):
        request = Request(id=row, prompt=[0] * length, sampling=sampling)
        sequence = Sequence(request, row, config.block_size, length + 1)
        sequence.row = row
        sequence.blocks = [0] * sequence.blocks_for(length)
        sequence.computed = length - count
        step.put(sequence, count)
    return step
