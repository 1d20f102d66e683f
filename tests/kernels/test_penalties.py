"""Penalties from a history on the device, against their definitions, token by token."""

import pytest
import torch


class Case:
    """Rows of scores whose histories lie, shuffled, in a table that is garbage wherever no token is."""

    def __init__(self, vocab: int, lengths: list[tuple[int, int]], device: torch.device, few: int = 0) -> None:
        """lengths: (prompt, all) of each row. few: how many different tokens occur, 0 = any."""
        count = len(lengths)
        self.scores = torch.randn(count, vocab, device=device) * 3
        self.prompt_lens, self.lengths = torch.tensor(lengths, device=device).T.contiguous()
        width = max(length for _, length in lengths) + 3
        self.history = torch.full((count + 2, width), 1 << 30, dtype=torch.int32, device=device)
        self.rows = torch.randperm(count + 2, device=device)[:count]
        self.tokens = [torch.randint(0, few or vocab, (length,), device=device) for _, length in lengths]
        for row, tokens in zip(self.rows.tolist(), self.tokens, strict=True):
            self.history[row, : len(tokens)] = tokens
        self.penalties = torch.empty(3, count, device=device).uniform_(-1.5, 1.5)
        self.penalties[0] = torch.empty(count, device=device).uniform_(0.5, 2.0)

    def arguments(self, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return scores, self.history, self.rows, self.prompt_lens, self.lengths, *self.penalties

    def expected(self) -> torch.Tensor:
        """The definitions in float64."""
        out = self.scores.double()
        for row, tokens in enumerate(self.tokens):
            repetition, presence, frequency = self.penalties[:, row].tolist()
            output = tokens[int(self.prompt_lens[row]) :].tolist()
            for token in set(tokens.tolist()):
                score = float(out[row, token])
                score = score / repetition if score > 0 else score * repetition
                count = output.count(token)
                out[row, token] = score - frequency * count - presence * (count > 0)
        return out


LENGTHS = [(1, 1), (5, 5), (7, 8), (40, 90), (0, 30), (1024, 1500), (3, 2300)]


@pytest.mark.parametrize("few", [0, 3])
@pytest.mark.parametrize("vocab", [17, 1000, 5003])
def test_matches_the_definitions(device: torch.device, vocab: int, few: int) -> None:
    from baton_kernels.penalties import apply_penalties
    from baton_kernels.reference.penalties import apply_penalties_reference

    case = Case(vocab, LENGTHS, device, few)
    case.penalties[0, 2], case.penalties[1, 3], case.penalties[2, 4] = 1.0, 0.0, 0.0
    case.penalties[:, 5] = torch.tensor([1.0, 0.0, 0.5], device=device)
    for function in (apply_penalties, apply_penalties_reference):
        scores = case.scores.clone()
        function(*case.arguments(scores))
        torch.testing.assert_close(scores.double(), case.expected(), rtol=1e-5, atol=1e-3)
        untouched = torch.ones_like(scores, dtype=torch.bool)
        for row, tokens in enumerate(case.tokens):
            untouched[row, tokens] = False
        assert torch.equal(scores[untouched], case.scores[untouched])


def test_what_is_in_the_scratch_does_not_matter(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton_kernels.penalties import apply_penalties

    case = Case(1000, LENGTHS, device)
    results = []
    for poison in (-1, 0, 12345):
        monkeypatch.setattr(torch, "empty", lambda shape, poison=poison, **how: torch.full(shape, poison, **how))
        scores = case.scores.clone()
        apply_penalties(*case.arguments(scores))
        results.append(scores)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rows_without_penalties_are_not_touched(device: torch.device) -> None:
    from baton_kernels.penalties import apply_penalties

    case = Case(1000, [(5, 50)] * 4, device)
    case.penalties[:, [0, 2]] = torch.tensor([[1.0], [0.0], [0.0]], device=device)
    # The history is not even read: there is no such row.
    case.rows[0] = 1 << 40
    scores = case.scores.clone()
    apply_penalties(*case.arguments(scores))
    changed = (scores != case.scores).any(dim=-1)
    assert changed.tolist() == [False, True, False, True]


def test_banned_tokens_stay_banned_and_rows_may_share_a_history(device: torch.device) -> None:
    from baton_kernels.penalties import apply_penalties

    case = Case(17, [(3, 40)] * 3, device)
    case.rows[:] = case.rows[0].clone()
    case.tokens = [case.tokens[0]] * 3
    case.scores[:, case.tokens[0][0]] = float("-inf")
    scores = case.scores.clone()
    apply_penalties(*case.arguments(scores))
    assert (scores[:, case.tokens[0][0]] == float("-inf")).all()
    finite = torch.isfinite(scores)
    torch.testing.assert_close(scores[finite].double(), case.expected()[finite], rtol=1e-5, atol=1e-4)
