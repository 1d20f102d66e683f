"""How the sequences of a decode step are cut into parts."""


def parts_reference(lengths: list[int], rows: list[int], capacity: int, block_keys: int) -> list[list[int]]:
    """Return the fields of each part, as DecodeParts has them. lengths: tokens of each sequence."""
    tiles = [-(-length // block_keys) for length in lengths]
    span = max(-(-sum(tiles) // capacity), 1)
    parts = []
    for sequence, (length, row, count) in enumerate(zip(lengths, rows, tiles, strict=True)):
        parts += [[sequence, part, -(-count // span), length, row] for part in range(-(-count // span))]
    return parts
