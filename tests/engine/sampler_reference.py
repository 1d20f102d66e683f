"""The definition of the sampler, in float64 numpy, token by token."""

import numpy as np
import numpy.typing as npt

from baton_engine.sampling import SamplingParams

Array = npt.NDArray[np.float64]


def edited(logits: Array, params: SamplingParams, prompt: list[int], output: list[int]) -> Array:
    """Return the logits after allowed and banned tokens, bias and penalties."""
    scores = logits.astype(np.float64).copy()
    for token in range(len(scores)):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            scores[token] = -np.inf
        for word in params.bad_words:
            if word[-1] == token and [*output, token][-len(word) :] == word:
                scores[token] = -np.inf
        if len(output) < params.min_tokens and token in params.eos_token_ids + params.stop_token_ids:
            scores[token] = -np.inf
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in prompt + output:
            if scores[token] > 0:
                scores[token] /= params.repetition_penalty
            else:
                scores[token] *= params.repetition_penalty
        count = output.count(token)
        scores[token] -= params.frequency_penalty * count
        if count:
            scores[token] -= params.presence_penalty
    return scores


def softmax(scores: Array) -> Array:
    weights: Array = np.exp(scores - scores.max())
    return weights / weights.sum()


def distribution(scores: Array, params: SamplingParams) -> Array:
    """Return the probabilities that a token is drawn from: temperature, then min_p, top_k and top_p in that order."""
    probabilities = softmax(scores / params.temperature)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    probabilities /= probabilities.sum()
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    if params.top_k:
        probabilities[order[params.top_k :]] = 0
        probabilities /= probabilities.sum()
    if params.top_p < 1:
        total = 0.0
        for token in order:
            if total >= params.top_p:
                probabilities[token] = 0
            total += probabilities[token]
        probabilities /= probabilities.sum()
    return probabilities
