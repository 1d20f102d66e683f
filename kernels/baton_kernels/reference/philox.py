"""Counter-based random numbers: the noise of a token depends on its id, seed, position and choice, and nothing else.

Philox 4x32-10 after Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Four consecutive token
ids share one counter (token id // 4, position, choice, 0), each taking one of its four words.
"""

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85


def philox(counter: list[torch.Tensor], key: list[torch.Tensor], rounds: int = 10) -> list[torch.Tensor]:
    """Encrypt counters with keys.

    counter: four, key: two int64 tensors that broadcast together, each holding unsigned 32-bit words.
    Returns four int64 tensors of unsigned 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # An int64 product of two 32-bit words wraps around, and its bits are still those of the unsigned product.
        a, b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0, c1, c2, c3 = (b >> 32 & _MASK) ^ c1 ^ k0, b & _MASK, (a >> 32 & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL_A) & _MASK, (k1 + _WEYL_B) & _MASK
    return [c0, c1, c2, c3]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for each token of the vocabulary, for the Gumbel-max trick.

    seeds: [R] int64, the bits of an unsigned 64-bit seed. positions: [R] int64, of the token to be drawn in its
    sequence. choices: [R] int64. Returns [R, vocab_size] float32, all finite.
    """
    counter = torch.arange((vocab_size + 3) // 4, device=seeds.device).unsqueeze(0)
    words = philox(
        [counter, positions.unsqueeze(1), choices.unsqueeze(1), torch.zeros_like(counter)],
        [(seeds & _MASK).unsqueeze(1), (seeds >> 32 & _MASK).unsqueeze(1)],
    )
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    # Large noise comes from small exponentials: (bits + 1) / 2^32 distinguishes them down to 2^-32. float32 rounds the
    # top of the range to 1, where log1p would be infinite, so it is limited to just below 1.
    uniform = ((bits + 1).to(torch.float32) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
