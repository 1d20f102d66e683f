"""An engine whose model is arithmetic and whose KV cache is a ledger: each slot says which tokens led up to it.

A step that reads a slot it should not, or writes one that others rely on, is noticed at once, thousands of steps a
second.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout, Plane
from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.runner import Choice
from baton_engine.sequence import Sequence, Step

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
    """Return a number for a beginning of a sequence; int64, so that a cache tensor can hold it."""
    value = 7
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (1 << 61)
    return value


def next_token(tokens: list[int], choice: int) -> int:
    """Return what the model says after these tokens. Tokens 0 and 1 are left to prompts."""
    return 2 + (fold(tokens) // 7 + 13 * choice) % (VOCAB_SIZE - 2)


def expected_output(prompt: list[int], choice: int, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, choice))
    return tokens[len(prompt) :]


class LedgerCache:
    """Slots [1, 1, blocks, block_size, 1, 1] int64 in place of KV."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.data = torch.full((1, 1, num_blocks, block_size, 1, 1), -1)
        self.num_blocks = num_blocks
        self.layout = KvLayout(1, (Plane("token", 1, 1, "float32"),))

    def slot(self, sequence: Sequence, position: int) -> torch.Tensor:
        size = self.data.shape[3]
        return self.data[0, 0, sequence.blocks[position // size], position % size]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        sources = [self.data[:, :, source].clone() for source, _ in pairs]
        for (_, target), values in zip(pairs, sources, strict=True):
            self.data[:, :, target] = values

    def scatter(self, blocks: list[int], extent: Extent, values: torch.Tensor) -> None:
        size = self.data.shape[3]
        for index, position in enumerate(range(extent.tokens.start, extent.tokens.stop)):
            self.data[:, :, blocks[position // size], position % size] = values[:, :, index]


class LedgerStep:
    """As Done, and the slots that the step writes."""

    def __init__(self, results: list[list[Choice]], writes: set[tuple[int, int]]) -> None:
        self._results = results
        self.writes = writes
        self.over = False

    def done(self) -> bool:
        return True

    def layers_done(self) -> int:
        return 0

    def wait(self) -> list[list[Choice]]:
        self.over = True
        return self._results


class LedgerRunner:
    """Stands in for Runner: writes the ledger, then checks every slot that attention would read.

    depth: as Runner.depth. What a device would do in order is done at launch; the engine learns of it when it waits.
    """

    prefill_rate = 250.0  # of which a step gets 3 tokens beside decodes

    def __init__(self, config: EngineConfig, depth: int) -> None:
        assert config.num_blocks is not None
        self.cache = LedgerCache(config.num_blocks, config.block_size)
        self.max_model_len = config.max_model_len or 4096
        self.depth = depth
        self._unread: dict[tuple[int, int], int] = {}  # tokens by sequence and position, as a device keeps them
        self._steps: list[LedgerStep] = []  # not waited for

    def fence(self) -> None:
        return None

    def writing(self) -> set[tuple[int, int]]:
        """Return the slots, as block and offset, that steps write which nobody has waited for yet."""
        return {slot for step in self._steps if not step.over for slot in step.writes}

    def launch(self, step: Step) -> LedgerStep:
        self.cache.copy(step.copies)
        texts = [self._text(sequence, end) for sequence, _, end in step]
        for (sequence, count, end), text in zip(step, texts, strict=True):
            for position in range(end - count, end):
                self.cache.slot(sequence, position)[:] = fold(text[: position + 1])
        size = self.cache.data.shape[3]
        done = LedgerStep(
            [self._choices(*entry) for entry in zip(step.sequences, texts, step.samples, strict=True)],
            {
                (sequence.blocks[position // size], position % size)
                for sequence, count, end in step
                for position in range(end - count, end)
            },
        )
        self._steps = [*(step for step in self._steps if not step.over), done]
        return done

    def _text(self, sequence: Sequence, end: int) -> list[int]:
        unread = [self._unread[id(sequence), position] for position in range(sequence.known, end)]
        return [*sequence.tokens(0, end), *unread]

    def _choices(self, sequence: Sequence, text: list[int], samples: bool) -> list[Choice]:
        for position in range(len(text)):
            found = self.cache.slot(sequence, position).item()
            assert found == fold(text[: position + 1]), f"position {position} holds another sequence's KV"
        if not samples:
            return []
        choices = sequence.choices
        tokens = [next_token(text, choice) for choice in choices]
        self._unread[id(sequence), len(text)] = tokens[0]
        return [Choice(token, None) for token in tokens]


def make_ledger_engine(folder: Path, depth: int = 0, **settings: Any) -> Engine:
    """Return an engine over a ledger; folder is where its config.json is put. depth: steps launched ahead."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton_engine.engine.make_runner", lambda config, *_: LedgerRunner(config, depth))
        return Engine(EngineConfig(model=str(folder), **settings))
