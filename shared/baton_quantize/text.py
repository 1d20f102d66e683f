"""Text for calibration and evaluation: a file of plain text or of JSON lines, as windows of token ids."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import msgspec
import torch
from tokenizers import Tokenizer

from baton_engine.config import ConfigError
from baton_engine.loading import check_tokenizer
from baton_tokenizer.errors import NoTokenizerError, TokenizerError
from baton_tokenizer.load import load_tokenizer

from .settings import Settings

_MOST_BYTES = 256 << 20
_LEAST_TOKENS = 16  # of a window
_PIECE_CHARACTERS = 16 << 10  # of plain text, in whole lines


class Texts(msgspec.Struct):
    """Sequences of token ids, int64. evaluated: what the evaluation text is, in words; None = there is none."""

    calibration: list[torch.Tensor]
    evaluation: list[torch.Tensor]
    evaluated: str | None


def read_texts(settings: Settings, calibrated: bool, vocab_size: int) -> Texts:
    """Return the sequences for calibration and evaluation. calibrated: whether the format needs calibration.

    Without a text of its own, the evaluation uses sequences of the calibration text that are left out of calibration,
    one for each four others. They are the same for all formats. Raises ConfigError for files that cannot be used.
    """
    calibrate, evaluate = settings.calibrate, settings.evaluate
    if calibrate is None and calibrated:
        raise ConfigError(f"--format {settings.format} needs --calibrate FILE: text like that which the model will see")
    if calibrate is None and evaluate is None:
        return Texts([], [], None)
    tokenizer = _tokenizer(settings.source, vocab_size)
    most_held_out = max(settings.samples // 4, 1)

    def read(path: Path, count: int) -> list[torch.Tensor]:
        return read_windows(path, tokenizer, settings.length, count, settings.seed)

    if evaluate is not None:
        calibration = read(calibrate, settings.samples) if calibrate is not None and calibrated else []
        return Texts(calibration, read(evaluate, most_held_out), evaluate.name)
    assert calibrate is not None
    windows = read(calibrate, settings.samples + most_held_out)
    if len(windows) == 1:
        # The report must not hide that the text was seen.
        note = ", which is too short to leave a part out of calibration" if calibrated else ""
        return Texts(windows if calibrated else [], windows, calibrate.name + note)
    held_out = min(most_held_out, max(len(windows) // 5, 1))
    return Texts(
        windows[held_out:] if calibrated else [], windows[:held_out], f"{calibrate.name} outside of calibration"
    )


def _tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    try:
        check_tokenizer(folder, vocab_size)
        return load_tokenizer(folder)
    except NoTokenizerError:
        raise ConfigError(f"{folder} has no tokenizer, which text needs") from None
    except TokenizerError as error:
        raise ConfigError(f"the tokenizer of {folder} cannot be used: {error}") from None


def read_windows(path: Path, tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[torch.Tensor]:
    """Return at most `count` windows of `length` token ids each, int64, that do not overlap.

    A file whose name ends with .jsonl has an object with the string "text" in each line. Any other file is plain text.
    The documents of a file, or parts of plain text, are taken in a random order that the seed determines; text that is
    not needed is not tokenized. A text of fewer than `length` tokens becomes one shorter window. Raises ConfigError for
    a file that cannot be read or has too little text.
    """
    pieces = list(_documents(path) if path.suffix == ".jsonl" else _parts(_read(path)))
    Random(seed).shuffle(pieces)
    ids = torch.tensor(_ids(pieces, tokenizer, length * count), dtype=torch.int64)
    if len(ids) < _LEAST_TOKENS:
        raise ConfigError(f"{path} has a text of {len(ids)} tokens; at least {_LEAST_TOKENS} are needed")
    if len(ids) < length:
        return [ids]
    return list(ids[: len(ids) // length * length].view(-1, length))[:count]


def _ids(pieces: Iterable[str], tokenizer: Tokenizer, most: int) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer.encode(piece).ids
        if len(ids) >= most:
            break
    return ids


def _documents(path: Path) -> Iterator[str]:
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {number} of {path} is not JSON: {error}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise ConfigError(f'line {number} of {path} is not an object with the string "text"')
        yield entry["text"]


def _parts(text: str) -> Iterator[str]:
    """Divide a text at ends of lines into parts of some thousand characters."""
    first = 0
    while first < len(text):
        end = text.find("\n", first + _PIECE_CHARACTERS) + 1 or len(text)
        yield text[first:end]
        first = end


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes; at most {_MOST_BYTES:,} are read: use a part of it")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
