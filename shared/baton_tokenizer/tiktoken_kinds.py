"""What a tiktoken file does not say of its tokenizer, which its model's authors publish as code: how a text is divided
into words, and which special tokens follow the vocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# Quantifiers that are possessive in an original pattern are greedy here. That differs in speed only, as no later part
# of these alternatives can match what they would give back.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_NOT_HAN = r"&&[^\p{Han}]"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased_words(besides: str) -> str:
    """Return a pattern that divides words where their case changes. besides: added to the classes of letters."""
    upper, lower = f"[{_UPPER}{besides}]", f"[{_LOWER}{besides}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{_CONTRACTION}?|{before}{upper}+{lower}*{_CONTRACTION}?"


def _llama3_tokens(first: int) -> dict[int, str]:
    known = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>",
             9: "<|eot_id|>"}  # fmt: skip
    unknown = (offset for offset in range(256) if offset not in known)
    reserved = {offset: f"<|reserved_special_token_{n}|>" for n, offset in enumerate(unknown)}
    return {first + offset: token for offset, token in sorted({**known, **reserved}.items())}


def _qwen_tokens(first: int) -> dict[int, str]:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]
    return dict(enumerate(tokens, first))


def _cl100k_tokens(first: int) -> dict[int, str]:
    tokens = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    return {**dict(enumerate(tokens, first + 1)), first + 20: "<|endofprompt|>"}


def _glm4_tokens(first: int) -> dict[int, str]:
    roles = (f"<|{role}|>" for role in ("system", "user", "assistant", "observation"))
    media = (f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end"))
    return dict(enumerate(["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", *roles, *media], first))


@dataclass(frozen=True)
class TiktokenKind:
    """pattern: of the words of a text. tokens: the special tokens by id, given the first id after the vocabulary.
    composed: texts are normalized to NFC first. names: special tokens by role. before: as in Draft."""

    pattern: str
    tokens: Callable[[int], dict[int, str]]
    composed: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    adds_bos: bool = False
    before: tuple[str, ...] = ()


QWEN = TiktokenKind(rf"{_WORDS}|\p{{N}}|{_REST}", _qwen_tokens, composed=True, names={"eos_token": "<|endoftext|>"})
LLAMA3 = TiktokenKind(
    rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    _llama3_tokens,
    names={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    adds_bos=True,
)
GLM4 = TiktokenKind(LLAMA3.pattern, _glm4_tokens, names={"eos_token": "<|endoftext|>"}, before=("[gMASK]", "<sop>"))
KIMI = TiktokenKind(
    rf"[\p{{Han}}]+|{_cased_words(_NOT_HAN)}|\p{{N}}{{1,3}}|{_REST}",
    lambda first: {first + n: f"<|reserved_token_{first + n}|>" for n in range(256)},
)
CL100K = TiktokenKind(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]|\s+(?!\S)|\s",
    _cl100k_tokens,
    names={"eos_token": "<|endoftext|>"},
)
O200K = TiktokenKind(
    rf"{_cased_words('')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    lambda first: {first + 1: "<|endoftext|>", first + 20: "<|endofprompt|>"},
    names={"eos_token": "<|endoftext|>"},
)

_BY_FILE = {"qwen.tiktoken": QWEN, "cl100k_base.tiktoken": CL100K, "o200k_base.tiktoken": O200K, "tiktoken.model": KIMI}
_BY_MODEL_TYPE = {"llama": LLAMA3, "qwen": QWEN, "kimi_k2": KIMI, "kimi_k25": KIMI, "kimi_linear": KIMI,
                  "chatglm": GLM4}  # fmt: skip


def find_kind(file: str, model_type: str) -> TiktokenKind | None:
    """Return the kind of a tiktoken file, by its name or else by the model_type of its model's config.json."""
    return _BY_FILE.get(file) or _BY_MODEL_TYPE.get(model_type)
