"""What a step brings."""

import itertools
import math

import msgspec

from baton_kernels.reference.sampling import NOT_FINITE

from .sampling import TokenLogprobs


class Choice(msgspec.Struct, gc=False):
    """A sampled token and, when the request wants them, its logprobs. The token is NOT_FINITE where the logits were not
    finite."""

    token: int
    logprobs: TokenLogprobs | None


class Results(msgspec.Struct):
    """choices: for each chunk of the plan the tokens that were drawn. A chunk whose numbers were not finite has one
    choice of NOT_FINITE in any case. prompt_logprobs: those of each chunk that wanted some."""

    choices: list[list[Choice]]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}


def mark_broken(choices: list[list[Choice]], starts: list[int], sums: list[float]) -> None:
    """Put NOT_FINITE in place of the choices of each chunk that computed something not finite.

    starts: where each chunk's tokens begin, as AttentionBatch has it. sums: for at least these tokens a number that is
    finite only where all of the token's hidden state is.
    """
    if all(map(math.isfinite, sums[: starts[-1]])):
        return
    for index, (first, end) in enumerate(itertools.pairwise(starts)):
        if not all(map(math.isfinite, sums[first:end])):
            choices[index] = [Choice(NOT_FINITE, None)]
