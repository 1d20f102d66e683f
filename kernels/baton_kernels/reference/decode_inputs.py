"""What a decode step needs on the device, unpacked from the one small buffer that the host sends for it."""

import torch

# Fields of a packed decode input, [FIELDS, sequences] int64. block: where this token's KV goes; -1 = nowhere.
# token: the input token; -1 = the last one sampled for the row, or 0 where that was not finite: the sequence has ended,
# which the host does not know yet. heat, top_p, min_p: the bits of a float32.
FIELDS = 10
ROW, POSITION, BLOCK, TOKEN, CHOICE, SEED, TOP_K, HEAT, TOP_P, MIN_P = range(FIELDS)
# Those that stay the same from step to step.
STATIC_FIELDS = slice(CHOICE, FIELDS)


def unpack_reference(
    packed: torch.Tensor, last_tokens: torch.Tensor, tables: torch.Tensor, block_size: int
) -> dict[str, torch.Tensor]:
    """Return what `DecodeInputs.unpack` puts under each name; tables is changed as it does."""
    row, position, block, token, choice, seed, top_k = packed[: TOP_K + 1]
    kept = block >= 0
    tables[row[kept], position[kept] // block_size] = block[kept].int()
    heat, top_p, min_p = packed[HEAT:].int().view(torch.float32)
    return {
        "token_ids": torch.where(token < 0, last_tokens[row].clamp(min=0), token),
        "rows": row,
        "positions": position,
        "slots": torch.where(kept, block * block_size + position % block_size, -1),
        "next_positions": position + 1,
        "choices": choice,
        "seeds": seed,
        "top_ks": top_k,
        "heats": heat,
        "top_ps": top_p,
        "min_ps": min_p,
        "lengths": (position + 1).int(),
    }
