"""Bodies that are meant to take long: as much of everything as a body can hold, inside and beyond the bounds."""

import json
from collections.abc import Callable
from dataclasses import dataclass

MEGABYTE = 1024 * 1024
MOST_BYTES = 4 * MEGABYTE


@dataclass(frozen=True)
class Hostile:
    """Some text around as many items as fit."""

    path: str
    before: str
    item: str | Callable[[int], str]
    after: str
    most: int | None = None  # items
    separator: str = ","

    def body(self, size: int = MOST_BYTES) -> bytes:
        """Return a body of about this many bytes, at most."""
        before, after = self.before.encode(), self.after.encode()
        sample = self.item if isinstance(self.item, str) else self.item(999_999)
        room = size - len(before) - len(after)
        count = max(room // len((sample + self.separator).encode()), 1)
        count = min(count, self.most or count)
        if isinstance(self.item, str):
            items = self.separator.join([self.item] * count)
        else:
            items = self.separator.join(map(self.item, range(count)))
        return before + items.encode() + after


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_PROMPT = '{"model": "tiny", "max_tokens": 2, "prompt": '
_HI = _PROMPT + '"hi", '
_MESSAGES = '{"model": "tiny", "max_tokens": 2, "messages": ['
_USER = '{"role": "user", "content": "hi"}'
_CHAT = _MESSAGES + _USER + "], "
_INPUT = '{"model": "tiny", "max_output_tokens": 2, "input": '
_256 = json.dumps(["hi"] * 256)
_FUNCTION = '{"type": "function", "function": {"name": "f%d", "parameters": {"a": 1}}}'


def _prompts(name: str, item: str | Callable[[int], str], most: int, brackets: str = "[]") -> Hostile:
    return Hostile(COMPLETIONS, f'{_PROMPT}{_256}, "{name}": {brackets[0]}', item, brackets[1] + "}", most)


HOSTILE = {
    "short ids": Hostile(COMPLETIONS, _PROMPT + "[", "1", "]}"),
    "a million ids": Hostile(COMPLETIONS, _PROMPT + "[", "1", "]}", 1_000_000),
    "ids that are none": Hostile(COMPLETIONS, _PROMPT + "[", "-1", "]}", 1_000_000),
    "lists of ids": Hostile(COMPLETIONS, _PROMPT + "[", "[1]", "]}"),
    "40,000 lists of ids": Hostile(COMPLETIONS, _PROMPT + "[", "[1]", "]}", 40_000),
    "256 lists of ids": Hostile(COMPLETIONS, _PROMPT + "[", "[" + "1," * 3999 + "1]", "]}", 256),
    "256 echoed lists of ids": Hostile(
        COMPLETIONS, '{"model": "tiny", "echo": true, "max_tokens": 0, "prompt": [', "[" + "9," * 3999 + "9]", "]}", 256
    ),
    "echo with log probabilities": Hostile(
        COMPLETIONS, '{"model": "tiny", "echo": true, "logprobs": 1, "max_tokens": 0, "prompt": [', "9", "]}", 10_000
    ),
    "streamed echo with log probabilities": Hostile(
        COMPLETIONS,
        '{"model": "tiny", "echo": true, "logprobs": 1, "max_tokens": 1, "stream": true, "prompt": [',
        *("9", "]}", 10_000),
    ),
    "returned ids": Hostile(
        COMPLETIONS,
        '{"model": "tiny", "return_token_ids": true, "n": 2, "max_tokens": 1, "prompt": [',
        "9",
        "]}",
        300_000,
    ),
    "empty prompts": Hostile(COMPLETIONS, _PROMPT + "[", '""', "]}"),
    "80,000 prompts": Hostile(COMPLETIONS, _PROMPT + "[", '"a"', "]}", 80_000),
    "256 long prompts": Hostile(COMPLETIONS, _PROMPT + "[", '"' + "hello " * 600 + '"', "]}", 256),
    "a sequence for each of 32,768": Hostile(COMPLETIONS, '{"model": "tiny", "n": 128, "prompt": [', '"a"', "]}", 256),
    "4,096 sequences": Hostile(
        COMPLETIONS, '{"model": "tiny", "n": 128, "max_tokens": 2, "logprobs": 5, "prompt": [', '"a"', "]}", 32
    ),
    "4,096 streams": Hostile(
        COMPLETIONS,
        '{"model": "tiny", "n": 128, "max_tokens": 2, "stream": true, "stream_options": '
        '{"include_usage": true, "continuous_usage_stats": true}, "prompt": [',
        *('"a"', "]}", 32),
    ),
    "a long text": Hostile(COMPLETIONS, _PROMPT + '"', "hello", '"}', separator=" "),
    "one long word": Hostile(COMPLETIONS, _PROMPT + '"', "a", '"}', separator=""),
    "escapes": Hostile(COMPLETIONS, _PROMPT + '"', "\\n", '"}', separator=""),
    # A search for strings must not read on to the end from each of these quotes.
    "escaped quotes outside of strings": Hostile(COMPLETIONS, "", '\\"', "[" * 60_000, 100_000, separator=""),
    "zeros": Hostile(COMPLETIONS, _PROMPT + '"', "\\u0000", '"}', separator=""),
    "four bytes each": Hostile(COMPLETIONS, _PROMPT + '"', "\U0001f701", '"}', separator=""),
    "half a pair": Hostile(COMPLETIONS, _PROMPT + '"', "\\ud83d", '"}', separator=""),
    "marks that combine": Hostile(COMPLETIONS, _PROMPT + '"a', "\u0301", '"}', separator=""),
    "256 prompts with 3,000 bad words": _prompts("bad_words", lambda n: f'"w{n}"', 3000),
    "256 prompts with 1,024 bad words": _prompts("bad_words", lambda n: f'"w{n}"', 1024),
    "256 prompts with 2,000 biases": _prompts("logit_bias", lambda n: f'"{n}": 1', 2000, "{}"),
    "256 prompts with 2,000 allowed": _prompts("allowed_token_ids", "1", 2000),
    "256 prompts with a grammar": _prompts("guided_choice", lambda n: f'"{n}"', 7000),
    "bad words": Hostile(COMPLETIONS, _HI + '"bad_words": [', '"a"', "]}"),
    "1,024 long bad words": Hostile(COMPLETIONS, _HI + '"bad_words": [', '"' + "ab" * 128 + '"', "]}", 1024),
    "biases": Hostile(COMPLETIONS, _HI + '"logit_bias": {', lambda n: f'"{n}": 1', "}}"),
    "16,384 biases": Hostile(COMPLETIONS, _HI + '"logit_bias": {', lambda n: f'"{n}": 1', "}}", 16_384),
    "allowed tokens": Hostile(COMPLETIONS, _HI + '"allowed_token_ids": [', "1", "]}"),
    "65,536 allowed tokens": Hostile(COMPLETIONS, _HI + '"allowed_token_ids": [', "1", "]}", 65_536),
    "stop tokens": Hostile(COMPLETIONS, _HI + '"stop_token_ids": [', "1", "]}"),
    "stops": Hostile(COMPLETIONS, _HI + '"stop": [', '"a"', "]}", 90_000),
    "an ignored list": Hostile(COMPLETIONS, _HI + '"ignored": [', "1", "]}"),
    "ignored nests": Hostile(COMPLETIONS, _HI + '"ignored": [', "[" * 20 + "]" * 20, "]}"),
    "ignored fields": Hostile(COMPLETIONS, _HI, lambda n: f'"f{n}": 1', "}"),
    "long numbers": Hostile(COMPLETIONS, _HI + '"ignored": [', "9" * 4299, "]}"),
    "long numbers as ids": Hostile(COMPLETIONS, _PROMPT + "[", "9" * 4299, "]}"),
    "a wide schema": Hostile(COMPLETIONS, _HI + '"guided_json": {"enum": [', "1", "]}}", 1_000_000),
    "a wide schema in bounds": Hostile(COMPLETIONS, _HI + '"guided_json": {"enum": [', "1", "]}}", 21_000),
    "a schema as text": Hostile(COMPLETIONS, _HI + '"guided_json": "{\\"enum\\": [', "1", ']}"}', 30_000),
    "a long expression": Hostile(COMPLETIONS, _HI + '"guided_regex": "', "(a|b)*", '"}', separator=""),
    "an expression in bounds": Hostile(COMPLETIONS, _HI + '"guided_regex": "', "(a|b)*", '"}', 10_000, separator=""),
    "options": Hostile(COMPLETIONS, _HI + '"guided_choice": [', '"a"', "]}"),
    "messages": Hostile(CHAT, _MESSAGES, _USER, "]}"),
    "100,000 messages": Hostile(CHAT, _MESSAGES, _USER, "]}", 100_000),
    "8,192 messages": Hostile(CHAT, _MESSAGES, _USER, "]}", 8192),
    "8,192 long messages": Hostile(CHAT, _MESSAGES, '{"role": "user", "content": "' + "hi " * 100 + '"}', "]}", 8192),
    "messages that are none": Hostile(CHAT, _MESSAGES, "{}", "]}"),
    "40,000 messages that are none": Hostile(CHAT, _MESSAGES, "{}", "]}", 40_000),
    "parts": Hostile(CHAT, _MESSAGES + '{"role": "user", "content": [', '{"type": "text", "text": "a"}', "]}]}"),
    "30,000 parts": Hostile(CHAT, _MESSAGES + '{"role": "user", "content": [', '{"text": "a"}', "]}]}", 30_000),
    "1,024 parts": Hostile(CHAT, _MESSAGES + '{"role": "user", "content": [', '{"text": "a"}', "]}]}", 1024),
    "an extra list": Hostile(CHAT, _MESSAGES + '{"role": "user", "content": "a", "x": [', "[]", "]}]}", 45_000),
    "extra fields": Hostile(
        CHAT, _MESSAGES + '{"role": "user", "content": "a", ', lambda n: f'"f{n}": 1', "}]}", 90_000
    ),
    "arguments": Hostile(
        CHAT,
        _MESSAGES + '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": [',
        *("1", ']}"}}]}]}'),
    ),
    "arguments in bounds": Hostile(
        CHAT,
        _MESSAGES + '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": [',
        *("1", ']}"}}]}]}', 190_000),
    ),
    "template variables": Hostile(CHAT, _CHAT + '"chat_template_kwargs": {', lambda n: f'"a{n}": 1', "}}", 90_000),
    "a template variable": Hostile(CHAT, _CHAT + '"chat_template_kwargs": {"a": [', "1", "]}}", 1_000_000),
    "a template variable in bounds": Hostile(CHAT, _CHAT + '"chat_template_kwargs": {"a": [', "1", "]}}", 4000),
    "a long template variable": Hostile(CHAT, _CHAT + '"chat_template_kwargs": {"a": "', "a", '"}}', separator=""),
    "functions": Hostile(CHAT, _CHAT + '"tools": [', lambda n: _FUNCTION % n, "]}"),
    "512 functions": Hostile(CHAT, _CHAT + '"tools": [', lambda n: _FUNCTION % n, "]}", 512),
    "functions that are none": Hostile(CHAT, _CHAT + '"tools": [', "{}", "]}", 45_000),
    "large parameters": Hostile(
        CHAT,
        _CHAT + '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [',
        *("1", "]}}}]}", 30_000),
    ),
    "a long name": Hostile(CHAT, _MESSAGES + _USER + '], "user": "', "a", '"}', separator=""),
    "functions that are refused": Hostile(CHAT, _CHAT + '"functions": [', "[]", "]}", 45_000),
    "items": Hostile(RESPONSES, _INPUT + "[", _USER, "]}"),
    "8,192 items": Hostile(RESPONSES, _INPUT + "[", _USER, "]}", 8192),
    "items that are none": Hostile(RESPONSES, _INPUT + "[", "{}", "]}", 45_000),
    "metadata": Hostile(RESPONSES, _INPUT + '"hi", "metadata": {', lambda n: f'"{n}": 1', "}}", 90_000),
    "long instructions": Hostile(RESPONSES, _INPUT + '"hi", "instructions": "', "hello", '"}', separator=" "),
    "a text to tokenize": Hostile(
        "/tokenize", '{"return_token_strs": true, "prompt": "', "\U0001f701", '"}', separator=""
    ),
    "messages to tokenize": Hostile("/tokenize", '{"messages": [', _USER, "]}", 8192),
    "ids to detokenize": Hostile("/detokenize", '{"tokens": [', "7", "]}"),
    "a million ids to detokenize": Hostile("/detokenize", '{"tokens": [', "7", "]}", 1_000_000),
    "ids that are too large": Hostile("/detokenize", '{"tokens": [', "-7", "]}", 1_000_000),
}
