"""The model's tokenizer. It releases the GIL, so long texts should be processed in a thread, see turns.py."""

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from ..reading.lark import LarkSpelling
from .control_tokens import ControlTokens
from .detokenizer import Detokenizer, read_pieces


class ModelTokenizer:
    """The tokenizer of a model, with the bytes of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """tokenizer: it must not be changed by others."""
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pieces = read_pieces(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.lark = LarkSpelling({token.content: (id, token.special) for id, token in added.items()})

    def encode_now(self, text: str, add_special_tokens: bool) -> list[int]:
        # encode_batch_fast releases the GIL, encode does not.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        # decode_batch releases the GIL, decode does not.
        return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(self, skip_special_tokens: bool, kept: Sequence[str] = ()) -> Detokenizer:
        """kept: special tokens that are not skipped."""
        kept_ids = {token_id for token in kept if (token_id := self.token_id(token)) is not None}
        return self._pieces.detokenizer(skip_special_tokens, frozenset(kept_ids))

    def control_tokens(self, more: Collection[int]) -> ControlTokens:
        """more: ids of control tokens that may lack the special flag."""
        return ControlTokens(self._tokenizer, more)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be only a part of a character."""
        return self._pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        r"""Return a readable name of a token. Part of a character is written as OpenAI does: `bytes:\xe2\x96`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
