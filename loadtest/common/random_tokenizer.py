"""A tokenizer for a model that has a configuration and no tokenizer."""

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE


def write_random_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer in which a token is a byte, or a space and four letters, about as long as a real
    token. The last token is a special one. It decodes every id below vocab_size. It is not meant for encoding text."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 1]
    words = (f"Ġ{word}" for word in itertools.islice(_words(), vocab_size - 1 - len(symbols)))
    vocab = {token: id for id, token in enumerate(itertools.chain(symbols, words))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _words() -> Iterator[str]:
    """Yield words of four letters, then words of five letters and more, without end."""
    return itertools.chain.from_iterable(
        map("".join, itertools.product(string.ascii_lowercase, repeat=length)) for length in itertools.count(4)
    )
