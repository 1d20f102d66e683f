"""Small models' folders, made on the spot: tokenizers of the two great families, and a chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Hello world, hello there! How are you today?",
    "日本語のテキスト と 中文 文本. Привет, мир! 🎉🎊 naïve café",
    "def main():\n    return 'code'\n" * 3,
]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<｜odd special｜>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<plain added>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return tokenizer


def byte_fallback_tokenizer(strip: bool = True) -> Tokenizer:
    """SentencePiece-like BPE as in Llama 2 (with strip) and Gemma (without)."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges = []
    for char in "▁helowrdT quicbnfxjmpsvtazyg日本".replace(" ", ""):
        vocabulary.setdefault(char, len(vocabulary))
    for left, right in [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "▁"), ("o", "r")]:
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Unigram with a Metaspace decoder, as in T5: a decoder the gateway has no tables for."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a model folder around a tokenizer that has <|begin|> and <|end|>."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 600}))
    generation = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "eos_token_id": [tokenizer.token_to_id("<|end|>"), 77]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
