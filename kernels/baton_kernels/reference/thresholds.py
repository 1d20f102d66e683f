"""min_p, top_k and top_p as one number per row: the lowest logit that may still be drawn."""

import torch


def thresholds_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """logits: [R, vocab]. temperatures: [R] float32, 0 = greedy. top_k: [R] int64, off when below 1 or at least vocab.
    top_p: [R] float32, off from 1 on. min_p: [R] float32, off at 0.

    Returns [R] float32: drawing among the tokens with logit >= threshold is drawing after min_p, top_k and top_p in
    this order, each on logits / temperature. -inf for a row without any of them, and for a greedy one.

    Equal logits stay together: top_k keeps all tokens that equal the k-th best, and top_p all that equal the first
    with which the mass of the kept ones reaches top_p.
    """
    vocab = logits.shape[-1]
    random = temperatures > 0
    ordered = logits.float().sort(dim=-1, descending=True).values
    scaled = ordered / torch.where(random, temperatures, 1.0).unsqueeze(1)
    kept = scaled >= scaled[:, :1] + min_p.log().unsqueeze(1)
    cut = (top_k > 0) & (top_k < vocab)
    kept &= ordered >= ordered.gather(1, torch.where(cut, top_k - 1, vocab - 1).unsqueeze(1))
    probabilities = scaled.masked_fill(~kept, float("-inf")).double().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    starts = torch.ones_like(kept)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    indices = torch.arange(vocab, device=logits.device)
    before = before.gather(1, torch.where(starts, indices, 0).cummax(dim=-1).values)
    kept &= (before < top_p.unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    lowest = ordered.masked_fill(~kept | ordered.isinf(), float("inf")).amin(dim=-1)
    off = ~random | (~cut & (top_p >= 1) & (min_p <= 0)) | lowest.isinf()
    return lowest.masked_fill(off, float("-inf"))
