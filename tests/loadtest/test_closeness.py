"""The comparison with transformers passes on this engine, and would not on one that computes something else."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

# Enough tokens for the share that bfloat16 changes not to be chance.
SIZES = ["--tiny", "--prompts", "16", "--longest", "110", "--tokens", "24"]


@pytest.fixture
def closeness() -> Iterator[ModuleType]:
    from loadtest.engine import closeness

    threads = torch.get_num_threads()
    yield closeness
    torch.set_num_threads(threads)


def run(closeness: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["closeness.py", *SIZES, *arguments])
    with pytest.raises(SystemExit) as ended:
        closeness.main()
    code: int = ended.value.code
    return code


def test_families_are_close(
    closeness: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # tests/engine/test_equality.py compares all families; these differ most in what the script itself does for them.
    families = "qwen", "gemma2", "gpt2", "deepseek_v3"
    code = run(closeness, monkeypatch, "--families", ",".join(families))
    lines = capsys.readouterr().out.splitlines()[1:]
    assert code == 0, lines
    ways = 4 if not torch.cuda.is_available() else 8
    assert len(lines) == len(families) * len(closeness.DTYPES) * ways
    for line in lines:
        assert " ok " in line
        if "float32" in line.split():
            assert ", 0 of " in line


def test_slightly_wrong_positions_fail(
    closeness: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from baton_engine.models import llama

    right = llama.rotary_tables

    def shifted(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = right(*arguments)
        # Relative positions stay right up to here, then one is skipped.
        return cos.index_select(0, order(len(cos))), sin.index_select(0, order(len(sin)))

    def order(count: int) -> torch.Tensor:
        return torch.tensor([min(index + (index > 40), count - 1) for index in range(count)])

    monkeypatch.setattr(llama, "rotary_tables", shifted)
    assert run(closeness, monkeypatch, "--families", "llama") == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert all("FAILED" in line for line in lines), lines


def test_a_model_that_repeats_itself_shows_nothing(
    closeness: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tied = closeness.FAMILIES["gemma2"] | {"tie_word_embeddings": True}
    monkeypatch.setitem(closeness.FAMILIES, "gemma2", tied)
    assert run(closeness, monkeypatch, "--families", "gemma2") == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert all("FAILED" in line and "repeats itself" in line for line in lines), lines


def test_an_engine_that_breaks_is_told(
    closeness: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def __init__(self, config: object) -> None:
            raise RuntimeError("out of paper")

    monkeypatch.setattr(closeness, "Engine", Broken)
    assert run(closeness, monkeypatch, "--families", "qwen2,mistral") == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert all("FAILED RuntimeError: out of paper" in line for line in lines), lines
    assert {line.split()[0] for line in lines} == {"qwen2", "mistral"}
