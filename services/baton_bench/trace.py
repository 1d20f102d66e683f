"""Recorded requests: their arrival times and the lengths of prompts and answers."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from baton_bench.errors import BenchError

BLOCK_TOKENS = 512
"""Tokens of prompt that a hash id of a Mooncake trace names."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """at: seconds since the first row. blocks: what names the prompt's content, block by block; None = not told."""

    at: float
    inputs: int
    outputs: int
    blocks: tuple[int, ...] | None = None


def read_trace(path: Path) -> list[TraceRow]:
    """Return the rows of a trace in order of time.

    `.csv` is Azure's format (TIMESTAMP, ContextTokens, GeneratedTokens), anything else Mooncake's: JSON lines with
    timestamp (ms), input_length, output_length and hash_ids. Raises BenchError.
    """
    parse = _azure_rows if path.suffix == ".csv" else _mooncake_rows
    try:
        rows = sorted(parse(path), key=lambda row: row.at)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise BenchError(f"cannot read the trace {path}: {error!r}") from None
    if not rows:
        raise BenchError(f"the trace {path} is empty")
    first = rows[0].at
    return [TraceRow(row.at - first, row.inputs, row.outputs, row.blocks) for row in rows]


def _azure_rows(path: Path) -> Iterator[TraceRow]:
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            yield TraceRow(at, max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1))


def _mooncake_rows(path: Path) -> Iterator[TraceRow]:
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            inputs, blocks = int(row["input_length"]), tuple(row["hash_ids"])
            if not 0 < inputs <= len(blocks) * BLOCK_TOKENS:
                raise ValueError(f"{len(blocks)} hash ids cannot be the content of {inputs} tokens")
            yield TraceRow(row["timestamp"] / 1000, inputs, max(int(row["output_length"]), 1), blocks)
