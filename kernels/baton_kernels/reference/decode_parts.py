"""How the sequences of a decode step are cut into parts."""


def parts_reference(
    lengths: list[int], rows: list[int], capacity: int, block_keys: int, classes: int = 1
) -> list[list[int]]:
    """Return the fields of each part, as DecodeParts has them.

    lengths: tokens of each sequence. classes: by the tiles of their parts, in which sequences are ordered.
    """
    tiles = [-(-length // block_keys) for length in lengths]
    span = max(-(-sum(tiles) // capacity), 1)
    counts = [-(-tile // span) for tile in tiles]

    def place(sequence: int) -> int:
        return -((-(-tiles[sequence] // counts[sequence]) * classes - 1) // span)

    order = sorted((sequence for sequence, count in enumerate(counts) if count), key=place)
    return [
        [sequence, part, counts[sequence], lengths[sequence], rows[sequence]]
        for sequence in order
        for part in range(counts[sequence])
    ]
