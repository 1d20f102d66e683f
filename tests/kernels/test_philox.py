"""Philox against the known answers of Random123, and the noise drawn from it against its distribution."""

import math

import pytest
import torch

from baton_kernels.reference.philox import gumbel_noise, philox

ONES = 0xFFFFFFFF

# From kat_vectors of Random123: counter, key, expected words, all for philox4x32 of 10 rounds.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words(counter: list[int], key: list[int]) -> list[int]:
    tensors = [[torch.tensor([word]) for word in part] for part in (counter, key)]
    return [int(word.item()) for word in philox(tensors[0], tensors[1])]


def noise(seed: int = 0, position: int = 0, choice: int = 0, vocab_size: int = 1000) -> torch.Tensor:
    return gumbel_noise(*(torch.tensor([value]) for value in (seed, position, choice)), vocab_size)[0]


def philox_reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox in Python's own integers, written from the paper."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [second >> 32 ^ counter[1] ^ key[0], second & ONES, first >> 32 ^ counter[3] ^ key[1], first & ONES]
        key = [(key[0] + 0x9E3779B9) & ONES, (key[1] + 0xBB67AE85) & ONES]
    return counter


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert words(counter, key) == expected
    assert philox_reference(counter, key) == expected


def test_many_counters_at_once_agree_with_plain_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, ONES + 1, (6, 500), generator=generator)
    got = torch.stack(philox(list(inputs[:4]), list(inputs[4:])), dim=1).tolist()
    assert got == [philox_reference(column[:4], column[4:]) for column in inputs.T.tolist()]


def test_noise_comes_from_the_counter_and_key_that_are_documented() -> None:
    seed, position, choice = 0x0123456789ABCDEF, 77, 3
    got = noise(seed, position, choice, vocab_size=10)
    for token in range(10):
        bits = philox_reference([token // 4, position, choice, 0], [seed & ONES, seed >> 32])[token % 4]
        uniform = (bits + 1) / 2**32
        assert got[token].item() == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-4, abs=1e-5)


def test_words_are_uniform() -> None:
    counters = [torch.arange(250_000), *(torch.zeros(1, dtype=torch.int64) for _ in range(3))]
    key = [torch.tensor([5]), torch.tensor([9])]
    for word in philox(counters, key):
        assert int(word.min()) >= 0
        assert int(word.max()) <= ONES
        counts = torch.bincount(word >> 24, minlength=256).double()
        expected = counts.sum() / 256
        chi_squared = ((counts - expected) ** 2 / expected).sum().item()
        # 255 degrees of freedom: mean 255, standard deviation 22.6.
        assert 160 < chi_squared < 370


def test_noise_is_gumbel() -> None:
    values = torch.cat([noise(seed, vocab_size=100_000) for seed in range(10)]).double()
    assert values.mean().item() == pytest.approx(0.5772157, abs=0.006)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for quantile in (0.001, 0.01, 0.5, 0.99, 0.999, 0.9999):
        exact = -math.log(-math.log(quantile))
        assert (values <= exact).double().mean().item() == pytest.approx(
            quantile, abs=5 * math.sqrt(quantile * (1 - quantile) / 1e6)
        )


def test_noise_is_finite_for_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = torch.tensor([[0, 1, 2, ONES // 2, ONES - 300, ONES - 128, ONES - 1, ONES]])
    monkeypatch.setattr("baton_kernels.reference.philox.philox", lambda *_: [edges[:, i::4] for i in range(4)])
    values = noise(vocab_size=8)
    assert torch.isfinite(values).all()
    # Close to zero the noise is greatest, and must keep words apart there.
    assert values[0].item() == pytest.approx(32 * math.log(2), abs=1e-3)
    assert values[0] > values[1] > values[2] > values[3] > values[4]


def test_nothing_repeats_across_seeds_positions_choices_and_tokens() -> None:
    rows = [
        (seed, position, choice)
        for seed in (0, 1, 1 << 32, 1 << 62, -1, -(1 << 63))
        for position in (0, 1, 2, 100_000)
        for choice in (0, 1, 7)
    ]
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    values = gumbel_noise(*columns, vocab_size=64)
    assert values.shape == (len(rows), 64)
    # 4,608 draws of about 2^24 values: two draws may well be equal by chance, but two equal rows are unlikely.
    assert len(torch.unique(values)) > 0.99 * values.numel()
    assert len(torch.unique(values, dim=0)) == len(rows)


def test_rows_and_vocabulary_size_do_not_matter() -> None:
    seeds, positions, choices = torch.tensor([3, 4, 5]), torch.tensor([10, 11, 12]), torch.tensor([0, 1, 2])
    together = gumbel_noise(seeds, positions, choices, 103)
    assert together.shape == (3, 103)
    for row in range(3):
        assert torch.equal(together[row], noise(3 + row, 10 + row, row, vocab_size=103))
    assert torch.equal(together[0], noise(3, 10, 0, vocab_size=1000)[:103])
