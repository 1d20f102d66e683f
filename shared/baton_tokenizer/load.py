"""The tokenizer of a model folder, from whichever files the folder has."""

import hashlib
import logging
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

from .byte_level import FILES, ByteLevelFiles
from .cache import read_entry, write_entry
from .draft import Draft
from .errors import NoTokenizerError, TokenizerError
from .model_folder import ModelFolder
from .sentencepiece import SentencePieceFile
from .special_names import special_names
from .tiktoken import TiktokenFile, looks_like_tiktoken

log = logging.getLogger(__name__)

_ONE_FILE = ("tokenizer.model", "spiece.model", "tiktoken.model")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")


@dataclass(frozen=True)
class TokenizerText:
    """A tokenizer. json: in the form of a tokenizer.json. names: its special tokens by role, such as bos_token."""

    json: str
    names: dict[str, str]

    def load(self) -> Tokenizer:
        """Raises TokenizerError for an invalid tokenizer."""
        try:
            return Tokenizer.from_str(self.json)
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"tokenizer.json: {error}") from None


def read_tokenizer(path: Path) -> TokenizerText:
    """Return the tokenizer of a model folder: its tokenizer.json, or else the conversion of a SentencePiece model, of a
    tiktoken file, or of vocab.json and merges.txt. No code of the folder is run.

    A conversion is kept, see cache.py. Raises TokenizerError for files that are invalid or of a kind that is not
    served, NoTokenizerError for a folder without a tokenizer.
    """
    folder = ModelFolder(path)
    if (data := folder.read("tokenizer.json")) is not None:
        try:
            return TokenizerText(data.decode(), special_names(folder, {}))
        except UnicodeDecodeError:
            raise TokenizerError(f"{path / 'tokenizer.json'} is not UTF-8") from None
    names = _files(folder)
    entry = _entry(folder, names)
    if (kept := read_entry(entry)) is not None:
        return msgspec.json.decode(kept, type=TokenizerText)
    began = time.monotonic()
    try:
        draft = _source(folder, names).convert()
        made = TokenizerText(draft.finish(folder).to_str(), dict(draft.names))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{' and '.join(names)} of {path}: {error}") from None
    write_entry(entry, msgspec.json.encode(made))
    log.info("converted %s of %s in %.1f s", " and ".join(names), path, time.monotonic() - began)
    return made


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a model folder. Raises what read_tokenizer raises."""
    return read_tokenizer(path).load()


class _Source(Protocol):
    def convert(self) -> Draft: ...


def _files(folder: ModelFolder) -> tuple[str, ...]:
    """Return the names of the files that hold the tokenizer of a folder without a tokenizer.json."""
    single = [name for name in _ONE_FILE if folder.names(name)] or folder.names("*.tiktoken")
    if len(single) > 1 and single[0] not in _ONE_FILE:
        raise TokenizerError(f"{folder.path} has more than one tokenizer: {', '.join(single)}")
    if single:
        return (single[0],)
    if all(folder.names(name) for name in FILES):
        return FILES
    raise NoTokenizerError(
        f"{folder.path} has no tokenizer: none of tokenizer.json, {', '.join(_ONE_FILE)}, *.tiktoken, and vocab.json "
        "with merges.txt"
    )


def _source(folder: ModelFolder, names: tuple[str, ...]) -> _Source:
    if names == FILES:
        return ByteLevelFiles(folder)
    data = folder.read(names[0]) or b""
    if names[0].endswith(".tiktoken") or looks_like_tiktoken(data):
        return TiktokenFile(folder, names[0], data)
    return SentencePieceFile(folder, names[0], data)


def _entry(folder: ModelFolder, names: tuple[str, ...]) -> str:
    """Return the name of a conversion in the cache: the hash of the files it reads, of this code, and of the library's
    version."""
    read = [(name, folder.read(name) or b"") for name in (*names, *_BESIDE)]
    code = [(path.name, path.read_bytes()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    digest = hashlib.sha256(version("tokenizers").encode())
    for name, content in (*read, *code):
        digest.update(f"\n{name} {hashlib.sha256(content).hexdigest()}".encode())
    return f"{digest.hexdigest()}.json"
