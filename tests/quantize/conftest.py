"""Text that the demo model knows, and models quantized with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_demo.corpus import Corpus
from baton_demo.samples import Sampler
from baton_quantize.job import quantize_model
from baton_quantize.report import Report
from baton_quantize.settings import Settings

Quantize = Callable[..., Report]


def quantize(source: Path, destination: Path, format: str, text: Path, **settings: Any) -> Report:
    """Quantize on the CPU with short sequences. progress: as in quantize_model."""
    progress = settings.pop("progress", lambda work, done, total: None)
    defaults: dict[str, Any] = {"calibrate": text, "samples": 24, "length": 128, "device": "cpu"}
    return quantize_model(
        Settings(source=source, destination=destination, format=format, **{**defaults, **settings}), progress
    )


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text as the demo model was trained on, drawn with another seed."""
    sampler = Sampler(Corpus.load(), 1)
    path = tmp_path_factory.mktemp("text") / "conversations.jsonl"
    samples = [sampler.sample() for _ in range(150)]
    texts = ["".join(segment.text for group in sample for segment in group) for sample in samples]
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    return path
