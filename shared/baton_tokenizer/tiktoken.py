"""Files of OpenAI's tiktoken: a line for each token, its bytes in base64 and its rank, which is its id."""

import base64
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from .added_tokens import AddedTokens
from .byte_level import letters
from .draft import Draft
from .errors import TokenizerError
from .merges import merges_by_rank
from .model_folder import ModelFolder
from .special_names import special_names
from .tiktoken_kinds import find_kind

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,8})\r?")
_LONGEST_TOKEN = 1024


def looks_like_tiktoken(data: bytes) -> bool:
    return _LINE.fullmatch(data[:4096].partition(b"\n")[0]) is not None


class TiktokenFile:
    """A tiktoken file in a model folder."""

    def __init__(self, folder: ModelFolder, name: str, data: bytes) -> None:
        """Raises TokenizerError for an invalid file, and for one of a model whose rules are unknown."""
        self._folder = folder
        self._path = folder.path / name
        kind = find_kind(name, folder.model_type())
        if kind is None:
            raise TokenizerError(
                f"{self._path}: how this model divides a text into words is not in the file and not known here; "
                "put a tokenizer.json beside it"
            )
        self._kind = kind
        self._ranks = self._read(data)

    def convert(self) -> Draft:
        """Return the tokenizer of the file, of its kind's special tokens and of those that the folder adds."""
        written = {token: letters(token) for token in self._ranks}
        ids = {written[token]: rank for token, rank in self._ranks.items()}
        tokens = self._kind.tokens(max(self._ranks.values()) + 1)
        defaults = {id: AddedToken(token, special=True, normalized=False) for id, token in tokens.items()}
        names = special_names(self._folder, self._kind.names)
        added = AddedTokens(self._folder, ids)
        added.collect(defaults, names.values())
        merges = [(written[left], written[right]) for left, right in merges_by_rank(self._ranks)]
        # A whole word that is a token needs no merges that lead to it.
        tokenizer = Tokenizer(models.BPE(vocab=added.ids, merges=merges, ignore_merges=True))
        if self._kind.composed:
            tokenizer.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(self._kind.pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens(added.in_order())
        return Draft(tokenizer, names, self._kind.adds_bos, before=self._kind.before)

    def _read(self, data: bytes) -> dict[bytes, int]:
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(data.split(b"\n"), 1):
            if not line.strip():
                continue
            if (match := _LINE.fullmatch(line)) is None:
                raise self._error(f"line {number} is not a token in base64 and its rank")
            try:
                token = base64.b64decode(match[1], validate=True)
            except ValueError:
                raise self._error(f"line {number} has no valid base64") from None
            if len(token) > _LONGEST_TOKEN:
                raise self._error(f"the token in line {number} is longer than {_LONGEST_TOKEN} bytes")
            ranks[token] = int(match[2])
        if len(set(ranks.values())) != len(ranks):
            raise self._error("two tokens have the same rank")
        if any(bytes([byte]) not in ranks for byte in range(256)):
            raise self._error("a byte has no token")
        return ranks

    def _error(self, message: str) -> TokenizerError:
        return TokenizerError(f"{self._path}: {message}")
