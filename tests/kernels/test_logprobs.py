"""Logprobs and ranks of chosen tokens against a log-softmax in float64."""

import math

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [17, 1000, 5003])
@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
def test_matches_float64(device: torch.device, vocab: int, dtype: torch.dtype, scale: float) -> None:
    from baton_kernels.logprobs import chosen_logprobs
    from baton_kernels.reference.logprobs import chosen_logprobs_reference

    logits = (torch.randn(7, vocab, device=device) * scale).to(dtype)
    tokens = torch.randint(0, vocab, (7,), device=device)
    tokens[0], tokens[1], tokens[2] = logits[0].argmax(), logits[1].argmin(), vocab - 1
    expected = logits.double().log_softmax(dim=-1)
    picked = expected.gather(1, tokens.unsqueeze(1))
    for function in (chosen_logprobs, chosen_logprobs_reference):
        logprobs, ranks, norms = function(logits, tokens)
        torch.testing.assert_close(logprobs.double(), picked[:, 0], rtol=1e-6, atol=1e-5)
        assert ranks.tolist() == ((logits > logits.gather(1, tokens.unsqueeze(1))).sum(dim=-1) + 1).tolist()
        everything = logits.float() - norms[:, :1] - norms[:, 1:]
        torch.testing.assert_close(everything.double(), expected, rtol=1e-6, atol=1e-5)
        assert torch.equal(everything.gather(1, tokens.unsqueeze(1))[:, 0], logprobs)


def test_equal_and_infinite_logits(device: torch.device) -> None:
    from baton_kernels.logprobs import chosen_logprobs
    from baton_kernels.reference.logprobs import chosen_logprobs_reference

    logits = torch.full((4, 1000), float("-inf"), device=device)
    logits[:, :10] = 1.0
    logits[1, 5] = 40.0
    logits[2, 700] = -40.0
    tokens = torch.tensor([9, 5, 700, 999], device=device)
    for function in (chosen_logprobs, chosen_logprobs_reference):
        logprobs, ranks, _ = function(logits, tokens)
        assert ranks.tolist() == [1, 1, 11, 11]
        ten = math.log(10)
        assert logprobs.tolist() == pytest.approx([-ten, 0.0, -41 - ten, -math.inf])


def test_everything_is_written_and_rows_do_not_depend_on_each_other(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton_kernels.logprobs import chosen_logprobs

    logits, tokens = torch.randn(5, 5003, device=device), torch.randint(0, 5003, (5,), device=device)
    clean = chosen_logprobs(logits, tokens)
    alone = chosen_logprobs(logits[3:4].clone(), tokens[3:4])
    assert all(torch.equal(a[0], b[3]) for a, b in zip(alone, clean, strict=True))

    def empty(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        poison = float("nan") if dtype.is_floating_point else -7
        return torch.full((shape,) if isinstance(shape, int) else shape, poison, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", empty)
    again = chosen_logprobs(logits, tokens)
    assert all(torch.equal(a, b) for a, b in zip(again, clean, strict=True))
