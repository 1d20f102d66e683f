"""Merges of byte-pair encodings that are stored as a list of tokens with scores or ranks."""

from collections.abc import Container, Mapping
from typing import TypeVar

Text = TypeVar("Text", str, bytes)


def merges_by_score(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece model, those of the best score first.

    SentencePiece joins whichever two neighbours give the piece with the best score. scores: of the pieces that merges
    make and use. ids: of at least these pieces.
    """
    found = []
    for piece, score in scores.items():
        pairs = sorted(_splits(piece, scores), key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(-score, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def merges_by_rank(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the merges of tokens that are joined in the order of their ranks."""
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        merges += sorted(_splits(token, ranks), key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _splits(token: Text, parts: Container[Text]) -> list[tuple[Text, Text]]:
    """Return the ways to divide a token into two that are parts themselves."""
    cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    return [(left, right) for left, right in cuts if left in parts and right in parts]
