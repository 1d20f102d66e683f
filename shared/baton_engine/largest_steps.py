"""The steps that take the most memory of all that an engine can be asked for: what they hold at most is set aside."""

from .config import EngineConfig
from .sampling import SamplingParams
from .sequence import Request, Sequence, Step

_PLAIN = SamplingParams(max_tokens=2, temperature=1.0)
# Everything at once that makes a draw take copies of its logits.
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
    prompt_logprobs=20,
)


def forward_steps(config: EngineConfig, max_model_len: int) -> list[Step]:
    """Return the largest steps of few sequences: whole prompts, and the last chunk of a sequence of full length.

    Their sequences all lie in block 0.
    """
    prompts = _split(config.max_num_batched_tokens, config.max_num_seqs, max_model_len, fewest=True)
    chunk = min(config.max_num_batched_tokens, max_model_len)
    return [
        _step(config, [(count, count) for count in prompts], _PLAIN),
        _step(config, [(chunk, max_model_len)], _PLAIN),
    ]


def sampling_steps(config: EngineConfig, max_model_len: int) -> list[Step]:
    """Return the largest steps of as many sequences as can run: prompts, then decodes, drawn in both ways."""
    prompts = _split(config.max_num_batched_tokens, config.max_num_seqs, max_model_len, fewest=False)
    chunks = [(count, count) for count in prompts]
    decodes = [(1, max_model_len)] * len(prompts)
    return [_step(config, part, sampling) for part in (chunks, decodes) for sampling in (_PLAIN, _EVERYTHING)]


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


def _step(config: EngineConfig, parts: list[tuple[int, int]], sampling: SamplingParams) -> Step:
    """parts: (tokens to compute, tokens in all) of each sequence."""
    step = Step()
    for row, (count, length) in enumerate(parts):
        request = Request(id=row, prompt=[0] * length, sampling=sampling)
        sequence = Sequence(request, row, config.block_size, length + 1)
        sequence.row = row
        sequence.blocks = [0] * sequence.blocks_for(length)
        sequence.computed = length - count
        step.put(sequence, count)
    return step
