"""SentencePiece models (Kudo & Richardson, 2018) of the kinds unigram and BPE, as Llama 2, Mistral and Gemma ship them.

A text has the tokens that the sentencepiece library gives it, with the exceptions that transformers makes. The text of
a control piece becomes that piece. With `legacy: false` in tokenizer_config.json only the beginning of the whole text
gets the dummy prefix, unless a space is there already; otherwise each text between two added tokens gets it. Rules such
as nmt_nfkc, which few decoders have, are applied by the tokenizers library, which loses some combining marks.
"""

import math
import re
from functools import cached_property

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from baton_proto.sentencepiece_pb2 import Model, Piece, TrainerSpec

from .added_tokens import AddedTokens
from .draft import Draft
from .errors import TokenizerError
from .merges import merges_by_score
from .model_folder import ModelFolder
from .special_names import special_names

_SPACE = "▁"
_LONGEST_PIECE = 1024
_BYTE = "<0x[0-9A-F]{2}>"
_MODEL_TYPES = (TrainerSpec.UNIGRAM, TrainerSpec.BPE)
# Whether a class of tokenizers puts bos and eos around a text unless tokenizer_config.json says it. Where it names no
# class, it is taken for Llama's.
_AROUND = {"": (True, False), "LlamaTokenizer": (True, False), "CodeLlamaTokenizer": (True, False),
           "GemmaTokenizer": (True, False), "T5Tokenizer": (False, True), "InternLMTokenizer": (True, False),
           "InternLM2Tokenizer": (True, False), "InternLM3Tokenizer": (True, False)}  # fmt: skip
# The special tokens that the code of a class of tokenizers puts after the pieces, and those that begin its texts.
_AFTER = {"ChatGLMTokenizer": ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>",
                               "<|observation|>")}  # fmt: skip
_BEFORE = {"ChatGLMTokenizer": ("[gMASK]", "sop")}


class SentencePieceFile:
    """A SentencePiece model in a model folder."""

    def __init__(self, folder: ModelFolder, name: str, data: bytes) -> None:
        """Raises TokenizerError for a file that is no such model, or a kind of model that is not served."""
        self._folder = folder
        self._path = folder.path / name
        try:
            self._model = Model.FromString(data)
        except DecodeError:
            raise TokenizerError(f"{self._path} is not a SentencePiece model") from None
        self._check()

    def convert(self) -> Draft:
        """Return the tokenizer of the model and of the tokens that the folder adds."""
        names, tokenizer_class = special_names(self._folder, self._names()), self._folder.tokenizer_class()
        added = AddedTokens(self._folder, {piece.piece: id for id, piece in enumerate(self._model.pieces)})
        kinds = (Piece.CONTROL, Piece.USER_DEFINED)
        defaults = {
            id: AddedToken(piece.piece, special=piece.type == Piece.CONTROL, normalized=False)
            for id, piece in enumerate(self._model.pieces)
            if piece.type in kinds
        }
        for id, token in enumerate(_AFTER.get(tokenizer_class, ()), len(self._model.pieces)):
            # Words such as "philosophy" have no token within them.
            defaults[id] = AddedToken(token, special=True, normalized=False, single_word=token.isalpha())
        added.collect(defaults, names.values())
        tokenizer = Tokenizer(self._bpe(added.ids) if self._is_bpe else self._unigram(added.ids))
        self._set_spaces(tokenizer)
        found = (self._found(token) for token in added.in_order())
        tokenizer.add_tokens([token for token in found if token is not None])
        return Draft(tokenizer, names, *_AROUND.get(tokenizer_class, (False, False)), _BEFORE.get(tokenizer_class, ()))

    def _check(self) -> None:
        pieces, trainer = self._model.pieces, self._model.trainer_spec
        if trainer.model_type not in _MODEL_TYPES:
            kind = TrainerSpec.ModelType.Name(trainer.model_type)
            raise self._error(f"models of the type {kind} are not served, only UNIGRAM and BPE")
        if trainer.treat_whitespace_as_suffix or not self._model.normalizer_spec.escape_whitespaces:
            raise self._error("spaces at the end of words, or spaces as they are, are not served")
        if len({piece.piece for piece in pieces}) != len(pieces):
            raise self._error("a piece is there twice")
        if [piece.type for piece in pieces].count(Piece.UNKNOWN) != 1:
            raise self._error("a model needs one unknown piece")
        for piece in pieces:
            if not 0 < len(piece.piece) <= _LONGEST_PIECE:
                raise self._error(f"a piece is empty, or longer than {_LONGEST_PIECE} characters")
            if piece.type == Piece.UNUSED or not math.isfinite(piece.score):
                raise self._error(f"the piece {piece.piece!r} is unused, or has no finite score")
        if self._byte_fallback and sum(piece.type == Piece.BYTE for piece in pieces) != 256:
            raise self._error("a model with bytes as pieces needs all 256")

    @property
    def _is_bpe(self) -> bool:
        return bool(self._model.trainer_spec.model_type == TrainerSpec.BPE)

    @property
    def _byte_fallback(self) -> bool:
        return any(piece.type == Piece.BYTE for piece in self._model.pieces)

    @property
    def _unknown(self) -> int:
        return next(id for id, piece in enumerate(self._model.pieces) if piece.type == Piece.UNKNOWN)

    def _names(self) -> dict[str, str]:
        pieces, trainer = self._model.pieces, self._model.trainer_spec
        ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "pad_token": trainer.pad_id}
        control = {id: piece.piece for id, piece in enumerate(pieces) if piece.type == Piece.CONTROL}
        names = {role: control[id] for role, id in ids.items() if id in control}
        return {**names, "unk_token": pieces[self._unknown].piece}

    @cached_property
    def _user_defined(self) -> frozenset[str]:
        return frozenset(piece.piece for piece in self._model.pieces if piece.type == Piece.USER_DEFINED)

    def _bpe(self, ids: dict[str, int]) -> models.BPE:
        pieces = (piece for piece in self._model.pieces if piece.type == Piece.NORMAL and piece.piece in ids)
        merges = merges_by_score({piece.piece: piece.score for piece in pieces}, ids)
        unknown = next(token for token, id in ids.items() if id == self._unknown)
        return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=self._byte_fallback)

    def _unigram(self, ids: dict[str, int]) -> models.Unigram:
        tokens = sorted(ids, key=ids.__getitem__)
        if ids[tokens[-1]] != len(tokens) - 1:
            raise self._error("ids of added tokens leave gaps after those of the model")
        scores = [_bonus(p.piece) if p.type == Piece.USER_DEFINED else p.score for p in self._model.pieces]
        scores += [0.0] * (len(tokens) - len(scores))
        return models.Unigram(list(zip(tokens, scores, strict=True)), self._unknown, self._byte_fallback)

    def _set_spaces(self, tokenizer: Tokenizer) -> None:
        """Set what happens to a text before the model sees it, and how tokens become a text again."""
        spec = self._model.normalizer_spec
        prefix = self._folder.flag("add_prefix_space", spec.add_dummy_prefix)
        # Folders that do not have the flag are older than it.
        legacy = self._folder.flag("legacy", True)
        first = [self._dummy_prefix()] if prefix and legacy else []
        tokenizer.normalizer = normalizers.Sequence([*self._cleaning(), *first, normalizers.Replace(" ", _SPACE)])
        splits: list[pre_tokenizers.PreTokenizer] = []
        if prefix and not legacy:
            splits.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
        if self._byte_fallback and not self._is_bpe:
            # Unigram would take the name of a byte's piece in a text for that piece.
            splits.append(pre_tokenizers.Split(Regex(f"<(?={_BYTE[1:]})"), "isolated"))
        if splits:
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
        joins = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*joins, decoders.Strip(" ", 1, 0)] if prefix else joins)

    def _cleaning(self) -> list[normalizers.Normalizer]:
        """Return what happens to a text before its dummy prefix."""
        spec = self._model.normalizer_spec
        steps: list[normalizers.Normalizer] = []
        if spec.precompiled_charsmap:
            steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
        if spec.remove_extra_whitespaces:
            steps.append(normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        return steps

    def _dummy_prefix(self) -> normalizers.Normalizer:
        pieces = [piece for piece in sorted(self._user_defined) if self._is_bpe and self._is_clean(piece)]
        if not pieces:
            return normalizers.Prepend(_SPACE)
        # The library normalizes the added tokens, too, which are to stay as they are. So a text that is one of them,
        # and nothing else, gets no prefix either.
        return normalizers.Replace(Regex(rf"\A(?!(?:{'|'.join(map(re.escape, pieces))})\z)"), _SPACE)

    def _found(self, token: AddedToken) -> AddedToken | None:
        """Return how an added token is found; None = by the model.

        User-defined pieces are parts of a text that has been normalized, and texts do not begin anew after them as they
        do after other added tokens. These are found as they are written, because a dummy prefix would be part of their
        normalized text.
        """
        if not token.special and token.content in self._user_defined and self._is_clean(token.content):
            return AddedToken(token.content, normalized=True) if self._is_bpe else None
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "special")}
        return AddedToken(token.content, normalized=False, **flags)

    def _is_clean(self, piece: str) -> bool:
        cleaned: str = normalizers.Sequence(self._cleaning()).normalize_str(piece)
        return cleaned == piece

    def _error(self, message: str) -> TokenizerError:
        return TokenizerError(f"{self._path}: {message}")


def _bonus(piece: str) -> float:
    """Return the score of a user-defined piece of Unigram, which wins over other pieces, as does one over two of them.

    Where several ways to read a text have the same sum of scores, as in a run of one character, rounding decides. That
    is not the same in both libraries.
    """
    return 1000.0 * len(piece) - 0.1
