"""Training batches: samples as padded token ids, labels and positions."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer

from baton_demo.chat import PAD
from baton_demo.samples import Sample, Sampler
from baton_demo.tokenizer import token_id

IGNORED = -100
"""The label of tokens that the cross entropy loss ignores."""

_POOL = 512
_TOKENS = 3072
_BEGINNING = 8


@dataclass(frozen=True)
class Row:
    ids: list[int]
    labels: list[int]
    positions: list[int]

    def beginnings(self) -> "Row":
        """Return the row with labels only on the first tokens of each answer, cut off after the last label.

        The first tokens select the answer, which is hard to learn. The rest is recitation and needs fewer samples.
        """
        labels = []
        run = 0
        for label in self.labels:
            run = 0 if label == IGNORED else run + 1
            labels.append(label if run <= _BEGINNING else IGNORED)
        end = 1 + max(i for i, label in enumerate(labels) if label != IGNORED)
        return Row(self.ids[:end], labels[:end], self.positions[:end])


@dataclass(frozen=True)
class Batch:
    """Each tensor is [rows, longest row], int64. Padding is on the right, where causal attention hides it."""

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, rows: list[Row], pad_id: int) -> "Batch":
        width = max(len(row.ids) for row in rows)

        def padded(values: list[list[int]], filler: int) -> torch.Tensor:
            return torch.tensor([value + [filler] * (width - len(value)) for value in values])

        return cls(
            ids=padded([row.ids for row in rows], pad_id),
            labels=padded([row.labels for row in rows], IGNORED),
            positions=padded([row.positions for row in rows], 0),
        )


def encode(sample: Sample, tokenizer: Tokenizer, gaps: list[int]) -> Row:
    """Return a sample as a row of token ids. Group g starts gaps[g] positions after the end of group g - 1."""
    row = Row([], [], [])
    position = 0
    for group, gap in zip(sample, gaps, strict=True):
        position += gap
        for segment in group:
            ids = tokenizer.encode(segment.text, add_special_tokens=False).ids
            row.ids.extend(ids)
            row.labels.extend(ids if segment.learn else [IGNORED] * len(ids))
            row.positions.extend(range(position, position + len(ids)))
            position += len(ids)
    return row


def batches(sampler: Sampler, tokenizer: Tokenizer, max_positions: int, seed: int) -> Iterator[Batch]:
    """Yield endless batches whose rows have similar lengths.

    Rotary attention sees only distances, so shifting a whole row would teach nothing. Instead, the positions of some
    rows jump ahead between turns, so that short samples train the distances of long contexts.
    """
    rng = Random(seed)
    pad_id = token_id(tokenizer, PAD)
    while True:
        rows = []
        for _ in range(_POOL):
            sample = sampler.sample()
            room = max_positions // 2 // len(sample)
            jumps = rng.random() < 0.25
            gaps = [0, *(int(room ** rng.random()) if jumps else 0 for _ in sample[1:])]
            row = encode(sample, tokenizer, gaps)
            rows.append(row.beginnings() if rng.random() < 0.7 else row)
        rows.sort(key=lambda row: len(row.ids))
        pool: list[list[Row]] = [[]]
        for row in rows:
            if len(row.ids) * (len(pool[-1]) + 1) > _TOKENS:
                pool.append([])
            pool[-1].append(row)
        rng.shuffle(pool)
        for group in pool:
            yield Batch.of(group, pad_id)
