"""Grammars compiled for one model's tokenizer, beside the steps of the engine."""

import json
import math
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton_common.cores import available_cores

from .matcher import Matcher
from .sampling import Grammar, GrammarKind

_MOST_COMPILED = 128
# A burst of new grammars takes at most so many cores from the threads of the engine's steps.
_MOST_THREADS = 4
# The library follows references between rules by recursion, about 4 KB for each, and a grammar has room for thousands.
_STACK_BYTES = 256 << 20
# Items bound the time of a mask: with as many as this, all of them ambiguous, some 30 ms. A lexer's states take up to
# 2 KB each. What an error says may not hold the text that led to it.
_LIMITS = LLParserLimits(max_items_in_row=1000, max_lexer_states=50_000, verbose_errors=False)
_LONGEST_MESSAGE = 300
# A weak model that has begun with white space may never end it. This is enough to indent a deep value.
_SPACE = r"[ \t\r\n]{1,32}"


class GrammarError(ValueError):
    """A grammar cannot be compiled; the message says why."""


class Grammars:
    """Compiles grammars in threads of its own and keeps the ones that were used last."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """folder: of the model, with its tokenizer.json, which is read with the first grammar."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[tuple[bytes, int, str], Future[Matcher]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._reading = threading.Lock()  # the tokenizer

    def compile(self, grammar: Grammar, salt: bytes = b"") -> "Future[Matcher]":
        """Return what will be a matcher at the beginning of its text, to be copied, or a GrammarError.

        salt: only requests with the same one share a compiled grammar, since the time that a compilation takes tells
        whether somebody has used the grammar before.
        """
        key = salt, grammar.kind, grammar.text
        if key in self._compiled:
            self._compiled.move_to_end(key)
        else:
            self._threads = self._threads or _start_threads(max(min(math.floor(available_cores()), _MOST_THREADS), 1))
            self._compiled[key] = self._threads.submit(self._compile, grammar)
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        return self._compiled[key]

    def _compile(self, grammar: Grammar) -> Matcher:
        with self._reading:
            tokenizer = self._tokenizer = self._tokenizer or _load_tokenizer(self._folder, self._vocab_size)
        try:
            state = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        except Exception as error:
            # Its reader of GBNF raises whatever it stumbles over.
            raise GrammarError(_shorten(str(error) or repr(error))) from None
        if state.is_error():
            raise GrammarError(_shorten(state.get_error()))
        return Matcher(state, self._vocab_size, tokenizer.eos_token)


def _start_threads(count: int) -> ThreadPoolExecutor:
    """Return an executor all of whose threads run already, with a large stack."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(count, thread_name_prefix="grammars")
        # A thread is started for each task that finds none idle.
        together = threading.Barrier(count)
        for started in [executor.submit(together.wait) for _ in range(count)]:
            started.result()
    finally:
        threading.stack_size(before)
    return executor


def _load_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        # Which tokens end a text is up to each request: any token without a text of its own stands for them here.
        end = min(token["id"] for token in json.loads(text)["added_tokens"] if token["special"])
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=end)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GrammarError(_shorten(f"this model's tokenizer knows no grammars: {error!r}")) from None


def _source(grammar: Grammar) -> str:
    """Return a grammar in the library's own form."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json(grammar.text)
        case GrammarKind.JSON_OBJECT:
            return _json('{"type":"object"}')
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
        case GrammarKind.CHOICE:
            texts = [json.dumps(text) for text in json.loads(grammar.text)]
            # As one terminal it is up to the lexer, which has room for more of them than the parser.
            return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(texts))
        case GrammarKind.TOOL_CALLS:
            return LLMatcher.grammar_from_lark(_tool_calls(**json.loads(grammar.text)))
        case kind:
            raise ValueError(f"kind {kind} is unknown to this version")


def _json(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _SPACE})


def _tool_calls(functions: dict[str, Any], parallel: bool) -> str:
    """Return a grammar for calls of functions as serving.proto describes them."""
    rules = ['start: "[" call (", " call)* "]"' if parallel else 'start: "[" call "]"']
    rules.append("call: " + " | ".join(f"call{index}" for index in range(len(functions))))
    for index, (name, schema) in enumerate(functions.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        guided = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})
        rules += [f'call{index}: {head} arguments{index} "}}"', f"arguments{index}: %json {guided}"]
    return "\n".join(rules)


def _shorten(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "…"
