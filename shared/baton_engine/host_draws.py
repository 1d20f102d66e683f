"""Draws the tokens of a step with torch, and computes the logprobs of its prompt tokens."""

import numpy as np
import torch

from .attention.backend import AttentionBatch
from .models.model import Model
from .results import Choice
from .row_table import RowTable
from .sampler import Draw, choose, token_logprobs
from .sampling import TokenLogprobs
from .step_plan import StepPlan

FLOAT_ROWS = 64  # bounds the memory of float32 copies of logits


def draw_tokens(plan: StepPlan, table: RowTable, logits: torch.Tensor, masks: np.ndarray | None) -> list[list[Choice]]:
    """Draw the tokens of a plan, and note them in the table.

    logits: [chunks that draw, vocab]. masks: one for each masked chunk. Returns the choices of each chunk.
    """
    mask_of = {chunk: masks[at] for at, chunk in enumerate(plan.masked)} if masks is not None else {}
    draws: list[Draw] = []
    owners: list[int] = []
    at = 0
    for chunk, (row, number) in enumerate(zip(plan.rows, plan.draws, strict=True)):
        new = table[row]
        draws += [
            Draw(new.sampling, new.prompt, new.output, at, new.choice + choice, mask_of.get(chunk))
            for choice in range(number)
        ]
        owners += [chunk] * number
        at += number > 0
    choices: list[list[Choice]] = [[] for _ in plan.rows]
    for first in range(0, len(draws), FLOAT_ROWS):
        part = slice(first, first + FLOAT_ROWS)
        for chunk, choice in zip(owners[part], choose(logits, draws[part]), strict=True):
            choices[chunk].append(choice)
    for row, drawn in zip(plan.rows, choices, strict=True):
        if drawn:
            # The other choices get rows of their own when they fork.
            table[row].output.append(drawn[0].token)
    return choices


def prompt_logprobs(
    plan: StepPlan, table: RowTable, model: Model, batch: AttentionBatch, hidden: torch.Tensor
) -> dict[int, list[TokenLogprobs]]:
    """Return the logprobs of prompt tokens by the chunks that want them. hidden: [T, hidden] of the batch's tokens."""
    found: dict[int, list[TokenLogprobs]] = {}
    for chunk, first in plan.prompt_logprobs:
        new, begin, end = table[plan.rows[chunk]], plan.ends[chunk] - plan.counts[chunk], plan.ends[chunk]
        targets = new.prompt[first : end + 1]
        # The logits at one position give the logprob of the token at the next position.
        start = batch.starts[chunk] + first - 1 - begin
        entries = found[chunk] = []
        for at in range(0, len(targets), FLOAT_ROWS):
            part = targets[at : at + FLOAT_ROWS]
            logits = model.logits(hidden[start + at : start + at + len(part)]).float()
            entries += token_logprobs(logits, part, [new.sampling.prompt_logprobs or 0] * len(part))
    return found
