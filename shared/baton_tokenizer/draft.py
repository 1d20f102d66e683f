"""A tokenizer that was made from other files than a tokenizer.json."""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer, processors

from .errors import TokenizerError
from .model_folder import ModelFolder


@dataclass(frozen=True)
class Draft:
    """A tokenizer without the tokens around each text. names: its special tokens by role. adds_bos, adds_eos: whether
    the kind of tokenizer puts these tokens around a text when tokenizer_config.json does not say it. before: other
    tokens that it puts before each text."""

    tokenizer: Tokenizer
    names: Mapping[str, str]
    adds_bos: bool = False
    adds_eos: bool = False
    before: tuple[str, ...] = ()

    def finish(self, folder: ModelFolder) -> Tokenizer:
        """Return the tokenizer, which adds the tokens that belong around each text."""
        begin = [*self.before, *self._around("bos_token", folder.flag("add_bos_token", self.adds_bos), folder)]
        end = self._around("eos_token", folder.flag("add_eos_token", self.adds_eos), folder)
        if begin or end:
            single = [*begin, "$A", *end]
            pair = [*single, *(f"{token}:1" for token in begin), "$B:1", *(f"{token}:1" for token in end)]
            ids = [(token, self.tokenizer.token_to_id(token)) for token in dict.fromkeys((*begin, *end))]
            self.tokenizer.post_processor = processors.TemplateProcessing(single, pair, ids)
        return self.tokenizer

    def _around(self, role: str, added: bool, folder: ModelFolder) -> list[str]:
        if not added or role not in self.names:
            return []
        token = self.names[role]
        if ":" in token or token.startswith("$"):
            raise TokenizerError(f"{folder.path}: the {role} {token!r} cannot be put around texts")
        return [token]
