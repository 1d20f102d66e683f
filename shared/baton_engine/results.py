"""The results of a step."""

import itertools
import math

import msgspec

from baton_kernels.not_finite import NOT_FINITE

from .sampling import TokenLogprobs


class Choice(msgspec.Struct, gc=False):
    """A sampled token and, when the request wants them, its logprobs. The token is NOT_FINITE where the logits were not
    finite."""

    token: int
    logprobs: TokenLogprobs | None


class Results(msgspec.Struct):
    """choices: the tokens that were drawn for each chunk of the plan. A chunk that computed a value that is not finite
    has a single choice NOT_FINITE, even if it draws no token. prompt_logprobs: by chunk, for those that want them."""

    choices: list[list[Choice]]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}


def mark_broken(choices: list[list[Choice]], starts: list[int], sums: list[float]) -> None:
    """Replace the choices of each chunk that computed a value that is not finite by a single NOT_FINITE.

    starts: the index of each chunk's first token, as in AttentionBatch. sums: for at least these tokens, a number that
    is finite only if the whole hidden state of the token is.
    """
    if all(map(math.isfinite, sums[: starts[-1]])):
        return
    for index, (first, end) in enumerate(itertools.pairwise(starts)):
        if not all(map(math.isfinite, sums[first:end])):
            choices[index] = [Choice(NOT_FINITE, None)]
