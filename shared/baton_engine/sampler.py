"""The sampler: it draws tokens from logits.

The order is OpenAI's and vLLM's: allowed and banned tokens, bias, penalties, grammar; temperature, min_p, top_k, top_p;
then the Gumbel-max trick with noise that depends on (seed, position, choice) alone, so that a token does not change
with the batch around it, with the pod, or after a restart.
"""

import msgspec
import numpy as np
import torch

from baton_kernels.not_finite import NOT_FINITE
from baton_kernels.reference.philox import gumbel_noise
from baton_kernels.reference.thresholds import thresholds_reference

from .results import Choice
from .sampling import SamplingParams, TokenLogprobs

_OFF = float("-inf")


class Draw(msgspec.Struct):
    """One token to draw. prompt, output: the tokens of the sequence so far. row: its row of logits."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    row: int
    choice: int
    mask: np.ndarray | None = None  # [words] int32, as baton_kernels.reference.masks has them


def choose(logits: torch.Tensor, draws: list[Draw]) -> list[Choice]:
    """Return the choice of each draw. logits: [R, vocab]. draws: in the order of their rows of logits."""
    first = draws[0].row
    rows = logits[first : draws[-1].row + 1].float()
    for draw in draws:
        draw.row -= first
    tokens = sample(rows, draws)
    wanted = [(draw, token) for draw, token in zip(draws, tokens, strict=True) if draw.params.logprobs is not None]
    logprobs = iter(
        token_logprobs(
            rows[[draw.row for draw, _ in wanted]],
            [token for _, token in wanted],
            [draw.params.logprobs or 0 for draw, _ in wanted],
        )
    )
    return [
        Choice(token, next(logprobs) if draw.params.logprobs is not None else None)
        for draw, token in zip(draws, tokens, strict=True)
    ]


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """logits: [R, vocab] float32, not changed. Returns a token id for each draw, NOT_FINITE where its row has a NaN or
    +inf."""
    # The maximum of a row with a NaN is NaN, which is not below infinity.
    finite = (logits.amax(dim=-1) < float("inf")).tolist()
    picked = _pick(logits, draws)
    return [token if finite[draw.row] else NOT_FINITE for token, draw in zip(picked, draws, strict=True)]


def _pick(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    if all(draw.params.greedy and not draw.params.edits_logits for draw in draws):
        best = logits.argmax(dim=-1).tolist()
        return [best[draw.row] for draw in draws]
    scores = logits[[draw.row for draw in draws]]
    for row, draw in zip(scores, draws, strict=True):
        if draw.params.edits_logits:
            _edit(row, draw)
    random = [index for index, draw in enumerate(draws) if not draw.params.greedy]
    if random:
        chosen = [draws[index] for index in random]
        scores[random] = _perturb(_filter(scores[random], [draw.params for draw in chosen]), chosen)
    picked: list[int] = scores.argmax(dim=-1).tolist()
    return picked


def _edit(scores: torch.Tensor, draw: Draw) -> None:
    """Apply the grammar's mask and the request's edits of logits to one row [vocab], in place."""
    if draw.mask is None:
        _edit_by_request(scores, draw)
        return
    allowed = np.unpackbits(draw.mask.view(np.uint8), bitorder="little")[: len(scores)].astype(bool)
    scores.masked_fill_(~torch.from_numpy(allowed), _OFF)
    by_grammar = scores.clone()
    _edit_by_request(scores, draw)
    if not (scores > _OFF).any():
        # The request's other restrictions must never lead to a token that the grammar forbids.
        scores.copy_(by_grammar)


def _edit_by_request(scores: torch.Tensor, draw: Draw) -> None:
    params = draw.params
    output = draw.output
    if params.allowed_token_ids:
        kept = scores[params.allowed_token_ids]
        scores.fill_(_OFF)
        scores[params.allowed_token_ids] = kept
    banned = [
        word[-1]
        for word in params.bad_words
        if len(word) == 1 or (len(output) >= len(word) - 1 and output[1 - len(word) :] == word[:-1])
    ]
    if len(output) < params.min_tokens:
        banned += [token for token in (*params.eos_token_ids, *params.stop_token_ids) if token < len(scores)]
    if banned:
        scores[banned] = _OFF
    if params.logit_bias:
        scores[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), device=scores.device)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*draw.prompt, *output}), device=scores.device)
        values = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.frequency_penalty or params.presence_penalty) and output:
        counts = torch.bincount(torch.tensor(output, device=scores.device), minlength=len(scores))
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def _filter(scores: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Divide rows by their temperatures and set the tokens that min_p, top_k and top_p leave out to -inf."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=scores.device)

    temperatures = column([p.draw_temperature for p in params])
    if any(p.filters for p in params):
        top_k = column([min(p.top_k, scores.shape[-1]) for p in params], torch.int64)
        least = thresholds_reference(
            scores, temperatures, top_k, column([p.top_p for p in params]), column([p.min_p for p in params])
        )
        scores = scores.masked_fill(scores < least.unsqueeze(1), _OFF)
    return scores / temperatures.unsqueeze(1)


def _perturb(scores: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=scores.device)

    seeds = column([draw.params.seed_bits for draw in draws])
    positions = column([len(draw.prompt) + len(draw.output) for draw in draws])
    return scores + gumbel_noise(seeds, positions, column([draw.choice for draw in draws]), scores.shape[-1])


def token_logprobs(logits: torch.Tensor, chosen: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Return the logprobs of one token per row of logits [R, vocab], with the counts[i] best alternatives of row i.

    The values of a row whose token is NOT_FINITE have no meaning.
    """
    if not chosen:
        return []
    logprobs = logits.log_softmax(dim=-1)
    picked = logprobs.gather(1, torch.tensor(chosen, device=logits.device).clamp(min=0).unsqueeze(1))
    ranks = (logprobs > picked).sum(dim=-1) + 1
    best, ids = logprobs.topk(min(max(counts), logprobs.shape[-1]), dim=-1)
    rows = zip(chosen, picked[:, 0].tolist(), ranks.tolist(), ids.tolist(), best.tolist(), counts, strict=True)
    return [TokenLogprobs(t, lp, rank, [int(i) for i in top[:n]], lps[:n]) for t, lp, rank, top, lps, n in rows]
