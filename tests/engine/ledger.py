"""An engine whose model is arithmetic and whose KV cache is a ledger: each slot holds a hash of the tokens up to it.

A step that reads a wrong slot, or overwrites a slot of another sequence, is detected at once. The engine computes
thousands of steps a second.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout, Plane
from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.executor import WithoutLayers
from baton_engine.results import Choice, Results
from baton_engine.row_table import RowTable
from baton_engine.step_plan import StepPlan
from baton_engine.step_times import StepTimes, StepWork

VOCAB_SIZE = 50
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 4096,
}


def fold(tokens: list[int]) -> int:
    """Return a hash of the first tokens of a sequence; int64, so that a cache tensor can hold it."""
    value = 7
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (1 << 61)
    return value


def next_token(tokens: list[int], choice: int) -> int:
    """Return the model's next token after these. Only prompts have the tokens 0 and 1."""
    return 2 + (fold(tokens) // 7 + 13 * choice) % (VOCAB_SIZE - 2)


def expected_output(prompt: list[int], choice: int, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, choice))
    return tokens[len(prompt) :]


class LedgerCache:
    """Slots [1, 1, blocks, block_size, 1, 1] int64 in place of KV. Each layer is a group of its own."""

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...]) -> None:
        self.data = torch.full((1, 1, num_blocks, block_size, 1, 1), -1)
        self.num_blocks = num_blocks
        self.layout = KvLayout(max(len(windows), 1), (Plane("token", 1, 1, "float32"),), windows)
        assert self.layout.depth == 1

    def slot(self, table: np.ndarray | list[int], position: int) -> torch.Tensor:
        size = self.data.shape[3]
        return self.data[0, 0, table[position // size], position % size]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        sources = [self.data[:, :, source].clone() for source, _ in pairs]
        for (_, target), values in zip(pairs, sources, strict=True):
            self.data[:, :, target] = values

    def read(self, tables: list[list[int]], extent: Extent) -> torch.Tensor:
        """Return one token's slot in one layer, [1]."""
        [run] = self.layout.runs(extent.layers)
        return self.slot(tables[run.group], extent.first_token).view(1)

    def scatter(self, tables: list[list[int]], extent: Extent, values: torch.Tensor) -> None:
        """values: [tokens], of all layers."""
        for run in self.layout.runs(extent.layers):
            for value, position in zip(values, range(extent.tokens.start, extent.tokens.stop), strict=True):
                self.slot(tables[run.group], position)[:] = value


class LedgerStep(WithoutLayers):
    """A Done that also holds the slots that the step writes.

    drawn: texts, each with a token that it gets when the engine has read the step.
    """

    def __init__(
        self, choices: list[list[Choice]], writes: set[tuple[int, int]], drawn: list[tuple[list[int], int]]
    ) -> None:
        self._choices, self._drawn = choices, drawn
        self.writes = writes
        self.over = False

    def draw_masked(self, masks: np.ndarray) -> None: ...

    def done(self) -> bool:
        return True

    def wait(self) -> Results:
        self.over = True
        for text, token in self._drawn:
            text.append(token)
        return Results(self._choices)


class FixedTimes(StepTimes):
    """Times that do not depend on how fast this machine is."""

    def observe(self, work: StepWork, predicted: float, seconds: float) -> None: ...


class LedgerRunner:
    """Stands in for Runner: writes the ledger, then checks every slot that attention would read.

    depth: as Runner.depth. The work of a device is done at launch; the engine gets the results when it waits.
    stages: if there are several, nobody knows a token that was drawn before the engine does.
    """

    compilations = 0

    def __init__(self, config: EngineConfig, depth: int, windows: tuple[int | None, ...], stages: int) -> None:
        assert config.num_blocks is not None
        self.cache = LedgerCache(config.num_blocks, config.block_size, windows)
        self.max_model_len = config.max_model_len or 4096
        self.depth, self.stages = depth, stages
        # 250 tokens a second give a step 7 prompt tokens beside decodes.
        self.times = FixedTimes.of_rate(250.0)
        self._groups = self.cache.layout.groups
        self._table = RowTable(config.max_num_seqs, self.max_model_len, config.block_size, len(self._groups))
        self._texts: dict[int, list[int]] = {}  # the tokens of each row, as a device keeps them
        self._steps: list[LedgerStep] = []  # those that the engine has not waited for

    def fence(self) -> None:
        return None

    def writing(self) -> set[tuple[int, int]]:
        """Return the slots, as block and offset, that the steps in flight write."""
        return {slot for step in self._steps if not step.over for slot in step.writes}

    def launch(self, plan: StepPlan) -> LedgerStep:
        self.cache.copy(plan.copies)
        self._table.take(plan)
        for new in plan.new_rows:
            self._texts[new.row] = [*new.prompt, *new.output]
        size = self.cache.data.shape[3]
        writes: set[tuple[int, int]] = set()
        for row, count, end in zip(plan.rows, plan.counts, plan.ends, strict=True):
            for table in self._table.blocks[row]:
                for position in range(end - count, end):
                    self.cache.slot(table, position)[:] = fold(self._texts[row][: position + 1])
                    writes.add((int(table[position // size]), position % size))
        chunks = zip(plan.rows, plan.counts, plan.ends, plan.draws, strict=True)
        choices = [self._choices(*chunk) for chunk in chunks]
        drawn = [(self._texts[row], each[0].token) for row, each in zip(plan.rows, choices, strict=True) if each]
        if self.stages == 1:
            for text, token in drawn:
                text.append(token)
            drawn = []
        done = LedgerStep(choices, writes, drawn)
        self._steps = [*(step for step in self._steps if not step.over), done]
        return done

    def _choices(self, row: int, count: int, end: int, draws: int) -> list[Choice]:
        text = self._texts[row]
        assert len(text) >= end, f"row {row} computes a token that is not known"
        for group, table in zip(self._groups, self._table.blocks[row], strict=True):
            for position in range(group.first_seen(end - count), end):
                found = self.cache.slot(table, position).item()
                assert found == fold(text[: position + 1]), f"position {position} holds another sequence's KV"
        if not draws:
            return []
        assert len(text) == end, f"row {row} draws a token that it has"
        first = self._table[row].choice
        tokens = [next_token(text, choice) for choice in range(first, first + draws)]
        return [Choice(token, None) for token in tokens]


def make_ledger_engine(
    folder: Path, depth: int = 0, windows: tuple[int | None, ...] = (), stages: int = 1, **settings: Any
) -> Engine:
    """Return an engine over a ledger; folder is where its config.json is put.

    depth: steps launched ahead. windows: of each layer; empty = one layer that sees all tokens. stages: as in Executor.
    """
    (folder / "config.json").write_text(json.dumps({**_CONFIG, "num_hidden_layers": max(len(windows), 1)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "baton_engine.engine.make_runner", lambda config, *_: LedgerRunner(config, depth, windows, stages)
        )
        return Engine(EngineConfig(model=str(folder), **settings))
