"""Texts in many scripts, and small tokenizers that were trained on some of them."""

import base64
import io
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import sentencepiece
from tiktoken._educational import bpe_train

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces  ",
    " one before",
    "The dog's tail, I'm sure you're HELLO WoRLD camelCase'S",
    "Привет, мир! Ёж",
    "مرحبا بالعالم، كيف الحال؟",
    "नमस्ते दुनिया, क्षत्रिय",
    "日本語のテキスト と 中文文本。",
    "안녕하세요 세계",
    "สวัสดีชาวโลก",
    "שלום עולם",
    "emoji 😀 👨‍👩‍👧 🏳️‍🌈 🇩🇪 ok",
    "cafe\u0301 e\u0301\u0327 \u0301x",
    "\x00\x01\x7f\x85 control \u200b\u200d\ufeff\u2028 end",
    "a\tb\t\tc\r\n\r\nd\n\n\n  e   \n",
    " " * 37 + "indented" + "\n" * 9,
    "0123456789 1234 12 1,234.5 ¼ ² Ⅷ １２３ ٣٤",
    "def f(x):\n    return {'a': [x + 1]}  # ok\n",
    "a==b && c!==d || ~/x/y_z-w.tar.gz https://x.y/?q=1",
    "aaaaaaa aaaab aaa aa a bbbbbbbb",
    "ﬁ ｈｅｌｌｏ ① ㎏ ½ \u3000 wide \u00a0 hard",
    "<0x41> <0x0A><0x> ▁already▁there ▁",
    "<unk2> <s2> [INST] hi [/INST] <|none|>",
    "\U0001f9ff\U0010fffd\ue000 private",
]
_CORPUS = [text for text in TEXTS if text.strip() and "\x00" not in text and "<" not in text] * 6
BYTES = {"byte_fallback": True, "character_coverage": 0.98}
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA = {"model_type": "bpe", "vocab_size": 600, **BYTES, **IDENTITY}
GEMMA = {
    **LLAMA,
    "add_dummy_prefix": False,
    **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>"},
    "user_defined_symbols": ["<start_of_turn>", "▁▁", "▁▁▁", "▁▁▁▁▁▁▁▁", "\n\n", "\n\n\n", "<table>"],
}
T5 = {"model_type": "unigram", "vocab_size": 400, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
UNIGRAM = {"model_type": "unigram", "vocab_size": 700, **BYTES}


def train_sentencepiece(options: Mapping[str, Any]) -> bytes:
    """Return a SentencePiece model that was trained on the texts."""
    return _train(json.dumps(options))


@lru_cache(maxsize=16)
def _train(options: str) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_writer=model,
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        **json.loads(options),
    )
    return model.getvalue()


@lru_cache(maxsize=1)
def train_ranks() -> dict[bytes, int]:
    """Return the ranks of a byte-level BPE that was trained on the texts."""
    return bpe_train(" ".join(_CORPUS), 450, r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", visualise=None)


def tiktoken_file(ranks: Mapping[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def write_folder(
    folder: Path, files: Mapping[str, bytes | str | Mapping[str, Any]], model_type: str = "llama", **settings: Any
) -> Path:
    """Write a model folder without weights. settings: fields of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "config.json": {"model_type": model_type},
        "tokenizer_config.json": settings,
        **files,
    }.items():
        data = json.dumps(content) if isinstance(content, Mapping) else content
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder
