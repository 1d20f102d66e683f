"""Byte-level BPE in two files, as GPT-2 (Radford et al., 2019) and others ship it: vocab.json and merges.txt."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from .added_tokens import AddedTokens
from .draft import Draft
from .errors import TokenizerError
from .model_folder import ModelFolder
from .special_names import special_names
from .tiktoken_kinds import QWEN

FILES = ("vocab.json", "merges.txt")


@dataclass(frozen=True)
class _Class:
    """What a class of tokenizers has beside the files. pattern: of the words of a text; None = GPT-2's."""

    names: Mapping[str, str]
    pattern: str | None = None
    composed: bool = False


_GPT2 = _Class(dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"))
_CLASSES = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "Qwen2Tokenizer": _Class(dict.fromkeys(("eos_token", "pad_token"), "<|endoftext|>"), QWEN.pattern, QWEN.composed),
}
_BY_MODEL_TYPE = {"gpt2": "GPT2Tokenizer", "codegen": "CodeGenTokenizer", "qwen2": "Qwen2Tokenizer"}


def letters(token: bytes) -> str:
    """Return the bytes of a token in GPT-2's letters, one for each byte."""
    return "".join(map(_LETTERS.__getitem__, token))


def _alphabet() -> list[str]:
    """Return GPT-2's letter for each byte (see its encoder.py). Printable bytes keep their characters."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = {byte: chr(0x100 + n) for n, byte in enumerate(byte for byte in range(0x100) if byte not in own)}
    return [others.get(byte, chr(byte)) for byte in range(0x100)]


_LETTERS = _alphabet()


class ByteLevelFiles:
    """vocab.json and merges.txt of a model folder."""

    def __init__(self, folder: ModelFolder) -> None:
        """Raises TokenizerError for a class of tokenizers whose rules are unknown."""
        self._folder = folder
        name = folder.tokenizer_class() or _BY_MODEL_TYPE.get(folder.model_type(), "")
        if name not in _CLASSES:
            raise TokenizerError(
                f"{folder.path}: vocab.json and merges.txt of the class {name or '(none)'} are not served, only of "
                f"{', '.join(_CLASSES)}; put a tokenizer.json beside them"
            )
        self._class = _CLASSES[name]

    def convert(self) -> Draft:
        """Return the tokenizer of the files and of the tokens that the folder adds."""
        ids, merges = self._vocabulary(), self._merges()
        # A role of the class whose token this vocabulary lacks is no token of this model.
        defaults = {role: token for role, token in self._class.names.items() if token in ids}
        names = special_names(self._folder, defaults)
        added = AddedTokens(self._folder, ids)
        added.collect({}, names.values())
        tokenizer = Tokenizer(models.BPE(vocab=added.ids, merges=merges))
        if self._class.composed:
            tokenizer.normalizer = normalizers.NFC()
        prefix = self._folder.flag("add_prefix_space", False)
        words = [] if self._class.pattern is None else [pre_tokenizers.Split(Regex(self._class.pattern), "isolated")]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not words)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens(added.in_order())
        return Draft(tokenizer, names)

    def _vocabulary(self) -> dict[str, int]:
        try:
            return msgspec.json.decode(self._folder.read(FILES[0]) or b"", type=dict[str, int])
        except ValueError as error:
            raise TokenizerError(f"{self._folder.path / FILES[0]}: {error}") from None

    def _merges(self) -> list[tuple[str, str]]:
        merges = []
        text = (self._folder.read(FILES[1]) or b"").decode(errors="replace")
        for number, line in enumerate(text.split("\n"), 1):
            left, _, right = line.rstrip("\r").partition(" ")
            if right and " " not in right and left != "#version:":
                merges.append((left, right))
            elif line.strip() and left != "#version:":
                raise TokenizerError(f"{self._folder.path / FILES[1]}: line {number} is not a pair of tokens")
        return merges
