"""Text for calibration and evaluation."""

import json
from pathlib import Path

import pytest
import torch

from baton_demo import MODEL_DIR
from baton_engine.config import ConfigError
from baton_quantize.settings import Settings
from baton_quantize.text import Texts, read_texts, read_windows
from baton_tokenizer.load import load_tokenizer

TOKENIZER = load_tokenizer(MODEL_DIR)


def settings(tmp_path: Path, text: str | bytes | None, name: str = "text.txt", **fields: object) -> Settings:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    given = {"calibrate": path, "samples": 8, "length": 16, **fields}
    return Settings(source=MODEL_DIR, destination=tmp_path / "to", format="int4-gptq", **given)  # type: ignore[arg-type]


def read(one: Settings, calibrated: bool = True) -> Texts:
    return read_texts(one, calibrated, 2048)


def sequences(windows: list[torch.Tensor]) -> set[tuple[int, ...]]:
    return {tuple(window.tolist()) for window in windows}


def test_calibration_and_evaluation_share_no_sequence(tmp_path: Path) -> None:
    words = "\n".join(f"The decode pod number {number} takes the baton." for number in range(3000))
    texts = read(settings(tmp_path, words))
    assert (len(texts.calibration), len(texts.evaluation)) == (8, 2)
    assert all(len(window) == 16 for window in texts.calibration + texts.evaluation)
    assert not sequences(texts.calibration) & sequences(texts.evaluation)
    assert sequences(read(settings(tmp_path, words)).calibration) == sequences(texts.calibration)
    assert sequences(read(settings(tmp_path, words, seed=1)).calibration) != sequences(texts.calibration)


def test_the_report_says_when_the_text_is_too_short_to_leave_a_part_out(tmp_path: Path) -> None:
    texts = read(
        settings(tmp_path, "one two three four five six seven eight nine ten eleven twelve thirteen " * 1, length=64)
    )
    assert len(texts.calibration) == 1
    assert 16 <= len(texts.calibration[0]) < 64
    assert sequences(texts.evaluation) == sequences(texts.calibration)
    assert "too short" in str(texts.evaluated)


def test_a_text_of_its_own_is_evaluated(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "Numbers: " + "0 1 2 3 4 5 6 7 8 9 " * 20}) + "\n\n")
    texts = read(settings(tmp_path, "the baton passes " * 200, evaluate=other))
    assert texts.evaluated == "other.jsonl"
    assert not sequences(texts.calibration) & sequences(texts.evaluation)
    only = read(settings(tmp_path, None, calibrate=None, evaluate=other), calibrated=False)
    assert only.calibration == []
    assert sequences(only.evaluation) == sequences(texts.evaluation)
    neither = read(settings(tmp_path, None, calibrate=None), calibrated=False)
    assert neither.evaluated is None


def test_documents_of_json_lines_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}", "id": n}) + "\n" for n in range(9)))
    windows = read_windows(path, TOKENIZER, 1000, 1, 0)
    found = TOKENIZER.decode(windows[0].tolist())
    assert sorted(found.split("document ")[1:]) == [str(number) for number in range(9)]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("text.txt", None, "cannot be read: No such file"),
        ("text.txt", "", "has a text of 0 tokens; at least 16"),
        ("text.txt", b"\xff\xfe" * 100, "is not UTF-8"),
        ("text.jsonl", '{"text": "a"}\n{"text": \n', "line 2 of .* is not JSON"),
        ("text.jsonl", "[" * 100_000, "line 1 of .* is not JSON"),
        ("text.jsonl", '{"text": 3}', 'line 1 of .* is not an object with the string "text"'),
        ("text.jsonl", '["text"]', 'line 1 of .* is not an object with the string "text"'),
    ],
)
def test_bad_text_is_named(name: str, text: str | bytes | None, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(settings(tmp_path, text, name))


def test_calibration_needs_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int4-gptq needs --calibrate FILE"):
        read(settings(tmp_path, None, calibrate=None))


@pytest.mark.parametrize(("field", "value"), [("samples", 0), ("length", 15), ("length", 1 << 30)])
def test_bad_numbers_are_named(field: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{field} {value}"):
        settings(tmp_path, None, **{field: value})
