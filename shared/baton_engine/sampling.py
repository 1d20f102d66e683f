"""The sampling parameters of a request."""

import enum
import math

import msgspec

GREEDY_BELOW = 1e-5
_HIGHEST_TEMPERATURE = 3e38
# Bounds how deeply the rules of a grammar can refer to each other.
MOST_GRAMMAR_CHARS = 1 << 16
# Each alternative of a token is computed, copied and sent in every step.
_MOST_LOGPROBS = 1_024


class GrammarKind(enum.IntEnum):
    """Mirrors baton.v1.Grammar.Kind."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    EBNF = 4
    CHOICE = 5
    TOOL_CALLS = 6
    LARK = 7


class Grammar(msgspec.Struct, frozen=True):
    """A grammar that the output must follow. Mirrors baton.v1.Grammar."""

    kind: int  # a GrammarKind, or a number that only a later version defines
    text: str
    field: str = "grammar"  # the field of the client's request that errors name
    around: str = ""  # Lark that says what stands around the text, which it names @answer


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Mirrors baton.v1.SamplingParams; defaults mean "off"."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []
    bad_words: list[list[int]] = []
    stop_token_ids: list[int] = []
    eos_token_ids: list[int] = []
    seed: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def draw_temperature(self) -> float:
        """The temperature of a draw, 0 when greedy, within the range of float32."""
        return 0.0 if self.greedy else min(self.temperature, _HIGHEST_TEMPERATURE)

    @property
    def seed_bits(self) -> int:
        """The seed's 64 bits as a signed number: torch has no unsigned 64-bit arithmetic."""
        return self.seed - (1 << 64 if self.seed >> 63 else 0)

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p may exclude tokens from a draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the draw, which then matters for greedy tokens too."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.min_tokens
            or self.grammar
        )

    def error(self, vocab_size: int) -> tuple[str, str] | None:
        """Return (field, message) when no engine with this vocabulary can use these parameters, else None."""
        limits: list[tuple[str, bool, str]] = [
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must be between 0 and max_tokens"),
            ("temperature", self.temperature >= 0, "must not be negative"),
            ("temperature", math.isfinite(self.temperature), "must be finite"),
            ("top_k", self.top_k >= 0, "must not be negative"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "must be above 0"),
            ("n", self.n >= 1, "must be at least 1"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "must be finite"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "must be finite"),
            ("repetition_penalty", math.isfinite(self.repetition_penalty), "must be finite"),
            ("logit_bias", all(map(math.isfinite, self.logit_bias.values())), "must be finite"),
            ("logprobs", 0 <= (self.logprobs or 0) <= _MOST_LOGPROBS, f"must be at most {_MOST_LOGPROBS}"),
            (
                "prompt_logprobs",
                0 <= (self.prompt_logprobs or 0) <= _MOST_LOGPROBS,
                f"must be at most {_MOST_LOGPROBS}",
            ),
            ("bad_words", all(self.bad_words), "each must hold at least one token"),
        ]
        for field, ok, message in limits:
            if not ok:
                return field, message
        for field, ids in (
            ("logit_bias", list(self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids),
            ("bad_words", [token for word in self.bad_words for token in word]),
        ):
            outside = [token for token in ids if not 0 <= token < vocab_size]
            if outside:
                return field, f"token id {outside[0]} is outside the vocabulary of {vocab_size}"
        grammar = self.grammar
        if grammar is not None and len(grammar.text) + len(grammar.around) > MOST_GRAMMAR_CHARS:
            return grammar.field, f"must have at most {MOST_GRAMMAR_CHARS} characters"
        return None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The model's own distribution (natural logarithms, before penalties and temperature) at one position."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]
