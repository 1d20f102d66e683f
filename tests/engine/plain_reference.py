"""Engines compared with a plain reference in float32, for models that transformers does not compute."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton_engine.engine import Engine

from .harness import Transcript, assert_idle, generate, make_engine, make_prompt, make_request

# Returns the logits [tokens, vocab] after each token of a sequence. The folder is that of the model.
Logits = Callable[[Path, list[int]], torch.Tensor]
PROMPTS = [make_prompt(length, seed=1) for length in (1, 17, 40)]


def compare(logits: Logits, folder: Path, **fields: Any) -> Transcript:
    """Compare answers to PROMPTS, and return them. Request i has prompt i. fields: of the requests."""
    engine = make_engine(folder)
    transcript = generate(engine, [make_request(id, prompt, 24, **fields) for id, prompt in enumerate(PROMPTS)])
    for id, prompt in enumerate(PROMPTS):
        _assert_greedy(logits, folder, prompt, transcript.tokens[id, 0])
    assert_idle(engine)
    return transcript


def compare_ranks(logits: Logits, folder: Path, engine: Engine) -> None:
    """Compare one answer of an engine of several ranks."""
    prompt = PROMPTS[-1]
    _assert_greedy(logits, folder, prompt, generate(engine, [make_request(0, prompt, 8)]).tokens[0, 0])


def slopes(heads: int) -> torch.Tensor:
    """Return the slopes of Press et al. (2022): for 8 heads 1/2 to 1/256, and between these for as many as are left."""
    power = 2 ** int(math.log2(heads))
    whole = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return torch.tensor([*whole, *(2 ** (-8 * (2 * head + 1) / (2 * power)) for head in range(heads - power))])


def _assert_greedy(logits: Logits, folder: Path, prompt: list[int], output: list[int]) -> None:
    after = logits(folder, prompt + output[:-1])[len(prompt) - 1 :]
    assert after.argmax(dim=-1).tolist() == output
