"""Compiles grammars for one model's tokenizer, in parallel with the steps of the engine."""

import json
import math
import re
import threading
from collections import Counter, OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton_common.cores import available_cores
from baton_tokenizer.load import TokenizerText, read_tokenizer

from .matcher import Matcher
from .sampling import Grammar, GrammarKind
from .schema_cost import check_embedded_schemas, check_schema

_MOST_COMPILED = 128
_MOST_COMPILED_CHARS = 1 << 20  # of the grammars in the cache together: the largest take up to 4 KB a character
# A burst of one tenant's new grammars takes at most so many cores from the threads of the engine's steps.
_MOST_THREADS = 4
# llguidance follows references between rules by recursion, with about 4 KB of stack for each. One grammar can hold
# thousands of them.
_STACK_BYTES = 256 << 20
# Items bound the time of a mask: about 30 ms for 1,000 in each row of the parser, all of them ambiguous. But the
# library counts them after it has made a row, and compares all items of a row with each other. A mask of usual grammars
# makes fewer than 7,000. With the library's default, rules that refer to themselves at their ends take up to a second
# in each mask. A state of the lexer takes up to 2 KB. The first fuel of the lexer bounds what a compilation takes: with
# the library's default, a regular expression of 64 KB takes 2 GB and ten seconds. Lists of 4,500 words and schemas of
# 700 numbers need less than this. Without verbose_errors, messages quote neither the grammar nor the parser's state.
_LIMITS = LLParserLimits(
    max_items_in_row=1000,
    step_max_items=12_000,
    max_lexer_states=50_000,
    initial_lexer_fuel=100_000,
    verbose_errors=False,
)
# Names, texts, expressions and operators in a Lark grammar. All of them may meet in one row, which takes up to 0.5 s
# then.
_MOST_LARK_PARTS = 10_000
_LARK_PART = re.compile(
    r"""(?:\#|//)[^\n]*|%json\s*(?=\{)|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>|[@\w-]+|::|%if|[|?*+~[{]""",
    re.ASCII,
)
_LONGEST_MESSAGE = 300
# A weak model may repeat white space forever, so its length is bounded. 32 characters can indent a deeply nested value.
_SPACE = r"[ \t\r\n]{1,32}"
_END = "\U0010fffd"
# Finds Lark, as llguidance does. Its own pattern takes quadratic time over empty lines, with the interpreter lock held.
_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
# The library converts GBNF in Python, and may read all of it again for each rule. To read this many characters takes up
# to a second.
_MOST_GBNF_READS = 1 << 23


class GrammarError(ValueError):
    """A grammar cannot be compiled; the message says why."""


class Grammars:
    """Compiles grammars in threads of its own and caches the most recently used ones.

    Salts take turns for the threads, and no salt may use all of them: a grammar that takes minutes in spite of all
    limits must not delay those of other tenants.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """folder: that of the model. Its tokenizer is read when the first grammar is compiled."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[tuple[bytes, int, str, str], Future[Matcher]] = OrderedDict()
        self._compiled_chars = 0
        self._threads: ThreadPoolExecutor | None = None
        self._most_of_one = max(min(math.floor(available_cores()), _MOST_THREADS), 1)  # threads that one salt may use
        self._busy: Counter[bytes] = Counter()  # threads that compile for each salt
        self._waiting: OrderedDict[bytes, deque[tuple[Grammar, Future[Matcher]]]] = OrderedDict()
        self._waiting_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()

    def compile(self, grammar: Grammar, salt: bytes = b"") -> "Future[Matcher]":
        """Return the future of a matcher in its initial state, to be copied. It raises GrammarError if compiling fails.

        salt: only requests with the same salt share a compiled grammar. Otherwise the time of a compilation would tell
        one tenant whether another has used the grammar.
        """
        key = salt, grammar.kind, grammar.text, grammar.around
        if key in self._compiled:
            self._compiled.move_to_end(key)
        else:
            self._threads = self._threads or _start_threads(self._most_of_one + 1)
            future: Future[Matcher] = Future()
            self._compiled[key] = future
            with self._waiting_lock:
                self._waiting.setdefault(salt, deque()).append((grammar, future))
            self._threads.submit(self._compile_waiting)
            self._compiled_chars += len(grammar.text) + len(grammar.around)
            while len(self._compiled) > _MOST_COMPILED or self._compiled_chars > _MOST_COMPILED_CHARS:
                (_, _, text, around), _ = self._compiled.popitem(last=False)
                self._compiled_chars -= len(text) + len(around)
        return self._compiled[key]

    def _compile_waiting(self) -> None:
        """Compile grammars until none waits for which its salt may use a thread."""
        while (turn := self._next_turn()) is not None:
            salt, grammar, future = turn
            try:
                future.set_result(self._compile(grammar))
            except BaseException as error:
                future.set_exception(error)
            with self._waiting_lock:
                self._busy[salt] -= 1
                self._busy += Counter()  # drops the salts for which no thread compiles

    def _next_turn(self) -> tuple[bytes, Grammar, "Future[Matcher]"] | None:
        """Take the oldest grammar of the salt that has waited longest for its turn, and may use one more thread."""
        with self._waiting_lock:
            salt = next((salt for salt in self._waiting if self._busy[salt] < self._most_of_one), None)
            if salt is None:
                return None
            waiting = self._waiting[salt]
            grammar, future = waiting.popleft()
            self._waiting.move_to_end(salt)
            if not waiting:
                del self._waiting[salt]
            self._busy[salt] += 1
            return salt, grammar, future

    def _compile(self, grammar: Grammar) -> Matcher:
        with self._tokenizer_lock:
            tokenizer = self._tokenizer = self._tokenizer or _load_tokenizer(self._folder, self._vocab_size)
        try:
            state = LLMatcher(tokenizer, _with_surroundings(grammar), log_level=0, limits=_LIMITS)
        except Exception as error:
            # The library's GBNF parser raises exceptions of any type.
            raise GrammarError(_shorten(str(error) or repr(error))) from None
        if state.is_error():
            raise GrammarError(_shorten(state.get_error()))
        return Matcher(state, self._vocab_size, tokenizer.eos_token, timed=grammar.kind == GrammarKind.EBNF)


def _start_threads(count: int) -> ThreadPoolExecutor:
    """Return an executor whose threads are all running, with a large stack."""
    previous_size = threading.stack_size(_STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(count, thread_name_prefix="grammars")
        # The executor starts a thread only for a task that finds no idle one, so each task waits until all have begun.
        all_started = threading.Barrier(count)
        for started in [executor.submit(all_started.wait) for _ in range(count)]:
            started.result()
    finally:
        threading.stack_size(previous_size)
    return executor


def _load_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    try:
        text, end = _with_end(read_tokenizer(folder))
        return LLTokenizer(text, n_vocab=vocab_size + 1, eos_token=end)
    except ValueError as error:
        raise GrammarError(_shorten(f"this model's tokenizer cannot be used with grammars: {error}")) from None


def _with_end(text: TokenizerText) -> tuple[str, int]:
    """Return a tokenizer with a token that stands for the end of a text, and that token.

    Each request has its own stop tokens. For grammars one special token, which has no text, stands for all of them. A
    tokenizer without special tokens gets one.
    """
    tokenizer = text.load()
    special = [id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    if special:
        return text.json, min(special)
    taken = set(tokenizer.get_vocab(with_added_tokens=True).values())
    tokenizer.add_special_tokens([_END])
    end = tokenizer.token_to_id(_END)
    if end is None or end in taken:
        raise ValueError("it has no special token, and gaps between its ids")
    return tokenizer.to_str(), end


def _with_surroundings(grammar: Grammar) -> str:
    """Return a grammar, and what stands around it, in llguidance's own form."""
    source = _source(grammar)
    if not grammar.around:
        return source
    # The library returns JSON, or Lark as it is.
    answer = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    return json.dumps({"grammars": [{"lark_grammar": grammar.around}, {**answer, "name": "answer"}]})


def _source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own form."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json(grammar.text)
        case GrammarKind.JSON_OBJECT:
            return _json('{"type":"object"}')
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.EBNF:
            text = grammar.text if _LARK.search(grammar.text) else _from_gbnf(grammar.text)
            source = _lark(text)
            _check_parts(text)
            return source
        case GrammarKind.CHOICE:
            texts = [json.dumps(text) for text in json.loads(grammar.text)]
            # As one terminal the texts are matched by the lexer, which has room for more of them than the parser.
            return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(texts))
        case GrammarKind.LARK:
            return _lark(grammar.text)
        case GrammarKind.TOOL_CALLS:
            return _lark(_tool_calls(**json.loads(grammar.text)))
        case kind:
            raise ValueError(f"kind {kind} is unknown to this version")


def _from_gbnf(text: str) -> str:
    if text.count("::=") * len(text) > _MOST_GBNF_READS:
        raise ValueError("it has so many rules that its conversion from GBNF would take too long; write it in Lark")
    converted: str = gbnf_to_lark(text)
    return converted


def _lark(text: str) -> str:
    check_embedded_schemas(text)
    return LLMatcher.grammar_from_lark(text)


def _check_parts(lark: str) -> None:
    """Raise ValueError when a client's Lark grammar has too many parts, without comments and embedded JSON schemas.

    Rules with parameters are refused, too. The parser makes a rule for each value that a parameter may have before the
    next character, so that ten lines can take it hours and all memory.
    """
    count = at = 0
    while part := _LARK_PART.search(lark, at):
        at = part.end()
        if part[0].startswith("%json"):
            _, at = json.JSONDecoder().raw_decode(lark, at)
        if part[0] in ("::", "%if"):
            raise ValueError("rules with parameters ('::' and '%if') are not served")
        count += not part[0].startswith(("#", "//"))
    if count > _MOST_LARK_PARTS:
        raise ValueError(f"it has more than {_MOST_LARK_PARTS} names, texts, expressions and operators")


def _json(schema: str) -> str:
    check_schema(schema)
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
