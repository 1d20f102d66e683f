"""Masks of tokens that may be drawn, packed as bits."""

import torch


def apply_masks_reference(
    scores: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor
) -> None:
    """Set the scores [R, vocab] float32 of the tokens that a mask leaves out to -inf, in place.

    logits: [B, vocab], the logits that the scores were made from. rows: [R] int64, the row of logits of each row of
    scores. masks: [M, words] int32, bit i % 32 of word i // 32 is 1 where token i may be drawn. mask_rows: [R] int64,
    the mask of each row of scores. Where every token that a mask allows has a score of -inf, these tokens get their
    logits back: other restrictions of a draw must never lead to a token that the mask forbids. A logit that is NaN or
    +inf becomes the score, whether the mask allows its token or not, so that the draw detects it.
    """
    token = torch.arange(scores.shape[1], device=scores.device)
    allowed = ((masks[mask_rows][:, token // 32] >> (token % 32)) & 1).bool()
    own = logits[rows].float()
    masked = torch.where(allowed, scores, float("-inf"))
    empty = ~(masked > float("-inf")).any(dim=1, keepdim=True)
    masked = torch.where(empty & allowed, own, masked)
    scores.copy_(torch.where(own < float("inf"), masked, own))
