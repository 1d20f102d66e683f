"""The inputs of a decode step on the device. The host sends rows, positions and the blocks of these positions; the rest
is looked up there by row."""

import torch

# Fields of a packed decode input, [2 + groups of layers, sequences] int64: the sequence's row in the row table, the
# position of its input token, and from BLOCKS on the block for that position's KV in each group. The last row of the
# table belongs to no sequence: inputs are padded with it.
ROW, POSITION, BLOCKS = range(3)
# Fields of the columns, [FIELDS, rows] int64. They hold for each row the token that was sampled last and the values
# that do not change from step to step. last token: negative where the logits were not finite; such a sequence has
# ended, though the host may not know it yet. temperature, top_p, min_p: the bits of a float32.
FIELDS = 7
LAST_TOKEN, CHOICE, SEED, TOP_K, TEMPERATURE, TOP_P, MIN_P = range(FIELDS)


def unpack_reference(
    packed: torch.Tensor, columns: torch.Tensor, tables: torch.Tensor, block_size: int, recent_tokens: int = 1
) -> dict[str, torch.Tensor]:
    """Return the tensors that `DecodeInputs.unpack` fills, by name, and write the blocks into the tables.

    tables: [rows, groups of layers, most blocks] int32. slots: [groups of layers * recent_tokens, sequences], the cache
    slot of each input token's KV, -1 (none) for padding, then the slots of the tokens before them, and so on.
    """
    row, position, block = packed[ROW], packed[POSITION], packed[BLOCKS:]
    real = row < columns.shape[1] - 1
    tables[row[real], :, position[real] // block_size] = block[:, real].T.int()
    slots = []
    for before in (position - lag for lag in range(recent_tokens)):
        blocks = tables[row, :, before.clamp(min=0) // block_size].T.long()
        slots.append(torch.where(real & (before >= 0), blocks * block_size + before % block_size, -1))
    last_token, choice, seed, top_k, *bits = columns[:, row]
    temperature, top_p, min_p = (field.int().view(torch.float32) for field in bits)
    return {
        "token_ids": last_token.clamp(min=0),
        "rows": row,
        "positions": position,
        "slots": torch.cat(slots),
        "next_positions": position + 1,
        "choices": choice,
        "seeds": seed,
        "top_ks": top_k,
        "temperatures": temperature,
        "top_ps": top_p,
        "min_ps": min_p,
        "lengths": (position + 1).int(),
    }
