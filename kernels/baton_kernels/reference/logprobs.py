"""Logprobs of chosen tokens and their ranks."""

import torch


def chosen_logprobs_reference(
    logits: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits: [R, vocab]. tokens: [R] int64.

    Returns the tokens' logprobs [R] float32 (natural logarithms), their ranks [R] int64 (1 + the number of tokens with
    a higher logit) and the norms [R, 2] float32: logit - norms[:, 0] - norms[:, 1], taken in this order, is the logprob
    of any token of the row. A row's best alternatives are thus torch.topk of its logits, less the two norms.
    """
    scores = logits.float()
    chosen = scores.gather(1, tokens.unsqueeze(1))
    top = scores.amax(dim=-1, keepdim=True)
    norms = torch.cat([top, (scores - top).exp().sum(dim=-1, keepdim=True).log()], dim=1)
    return chosen[:, 0] - norms[:, 0] - norms[:, 1], (scores > chosen).sum(dim=-1) + 1, norms
