"""The fused draw against the reference, and against the distribution that it must follow."""

import torch


def test_draws_the_same_tokens_as_the_reference(device: torch.device) -> None:
    from baton_kernels.reference.sampling import gumbel_argmax_reference
    from baton_kernels.sampling import gumbel_argmax

    rows, vocab = 6, 5001
    logits = torch.randn(rows, vocab, device=device)
    temperatures = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.0], device=device)
    thresholds = torch.full((rows,), float("-inf"), device=device)
    thresholds[4] = 2.0
    seeds = torch.randint(-(2**62), 2**62, (rows,), device=device)
    positions = torch.randint(0, 1 << 20, (rows,), device=device)
    choices = torch.arange(rows, device=device)
    arguments = (logits, temperatures, thresholds, seeds, positions, choices)
    drawn = gumbel_argmax(*arguments)
    assert drawn.tolist() == gumbel_argmax_reference(*arguments).tolist()
    assert drawn[0] == logits[0].argmax()
    assert logits[4, drawn[4]] >= 2.0
    for parts in (1, 4):
        assert torch.equal(gumbel_argmax(*arguments, parts=parts), drawn)
