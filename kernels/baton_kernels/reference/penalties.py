"""Repetition, presence and frequency penalties, from a table of each sequence's tokens.

Repetition: Keskar et al., "CTRL" (2019). Presence and frequency: OpenAI's API reference.
"""

import torch


def apply_penalties_reference(
    scores: torch.Tensor,
    history: torch.Tensor,
    rows: torch.Tensor,
    prompt_lens: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Change scores [R, vocab] float32 in place.

    history: [rows, max_len] int32, the tokens of each sequence, prompt first; entries beyond its length are not read.
    rows: [R] int64, the row of history of each row of scores. prompt_lens, lengths: [R] int64, the tokens of the
    prompt, and of prompt and output. repetition: [R] float32, off at 1: the score of every token of prompt and output
    is divided by it when positive, else multiplied. presence, frequency: [R] float32, off at 0: both are subtracted
    from the scores of the output's tokens, presence once and frequency once per occurrence.
    """
    index = torch.arange(history.shape[1], device=history.device).unsqueeze(0)
    there = index < lengths.unsqueeze(1)
    tokens = torch.where(there, history[rows], 0).long()
    seen, counts = torch.zeros_like(scores), torch.zeros_like(scores)
    seen.scatter_add_(1, tokens, there.float())
    counts.scatter_add_(1, tokens, (there & (index >= prompt_lens.unsqueeze(1))).float())
    factor = torch.where(seen > 0, repetition.unsqueeze(1), 1.0)
    scores.copy_(torch.where(scores > 0, scores / factor, scores * factor))
    scores -= frequency.unsqueeze(1) * counts + presence.unsqueeze(1) * (counts > 0)
