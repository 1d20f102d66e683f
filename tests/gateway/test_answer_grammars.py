"""Grammars of answers in each format, followed by a model that writes anything they allow."""

import json
import random
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLExecutor
from tokenizers import AddedToken, Tokenizer

from baton_engine.grammars import GrammarError, Grammars
from baton_engine.matcher import Matcher, fill_masks
from baton_engine.sampling import Grammar, GrammarKind
from baton_gateway.bounds import MAX_RULES_CHARS
from baton_gateway.errors import ApiError
from baton_gateway.models.tokenizer import ModelTokenizer
from baton_gateway.reading.parts import AnswerReader, WholeAnswer, put_together
from baton_gateway.reasoning.formats import FORMATS, ReasoningFormat
from baton_gateway.reasoning.thought_reader import Place
from baton_gateway.tools.call_rules import CallRules
from baton_gateway.tools.tool_formats import PARSERS, ToolFormat

from .tiny_models import byte_level_tokenizer

VOCABULARY = 700
FUNCTIONS: dict[str, Any] = {
    "book": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Köln"], "type": "string"},
            "nights": {"type": "integer", "minimum": 1, "maximum": 9},
            "cheap": {"type": "boolean"},
        },
        "required": ["city", "nights"],
        "additionalProperties": False,
    },
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
}
ANSWER = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
MANY: Any = {"properties": {f"p{n}": {} for n in range(2000)}}
REFERRING: Any = {"$defs": {"a": "x" * 30_000}, "properties": {f"p{n}": {"$ref": "#"} for n in range(1000)}}
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class Follower:
    """A tokenizer that has the markers of all formats, and the grammars of pods for it."""

    def __init__(self, folder: Path, marked: bool = True) -> None:
        """marked: whether the markers are tokens."""
        tokenizer = byte_level_tokenizer()
        markers: set[str] = {marker for kind in (*FORMATS.values(), *PARSERS.values()) for marker in kind.markers}
        special = sorted(markers - set(PLAIN))
        if marked:
            tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in PLAIN])
            tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in special])
        tokenizer.save(str(folder / "tokenizer.json"))
        self.raw: Tokenizer = tokenizer
        self.tokenizer = ModelTokenizer(tokenizer)
        self.lark = self.tokenizer.lark
        self.end = tokenizer.token_to_id("<｜odd special｜>")
        self._grammars = Grammars(folder, VOCABULARY)
        self._executor = LLExecutor(num_threads=1)

    def start(self, kind: GrammarKind, text: str, around: str = "") -> "Walk":
        return Walk(self, self._grammars.compile(Grammar(kind, text, around=around)).result().copy())

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.raw.encode(text, add_special_tokens=False).ids
        return ids

    def mask(self, matcher: Matcher) -> set[int]:
        """Return the tokens that may follow. `end` stands for the end of the text."""
        masks = np.zeros((1, (VOCABULARY + 31) // 32), dtype=np.int32)
        fill_masks(self._executor, [(matcher, 0)], masks)
        matcher.set_ends(masks[0], [self.end])
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[:VOCABULARY]
        return set(np.flatnonzero(bits).tolist())


class Walk:
    """One output on its way through a grammar."""

    def __init__(self, follower: Follower, matcher: Matcher) -> None:
        self._follower = follower
        self._matcher = matcher
        self.output: list[int] = []

    @property
    def allowed(self) -> set[int]:
        return self._follower.mask(self._matcher)

    def take(self, ids: Iterable[int]) -> bool:
        """Add tokens to the output. Return whether the grammar allows them."""
        self.output += ids
        return self._matcher.follow(self.output)

    def write(self, text: str) -> bool:
        return self.take(self._follower.ids(text))

    def wander(self, rng: random.Random, most: int = 400) -> None:
        """Add tokens at random until the text has ended."""
        for _ in range(most):
            allowed = sorted(self.allowed)
            token = self._follower.end if self._follower.end in allowed and rng.random() < 0.5 else rng.choice(allowed)
            if token == self._follower.end:
                return
            assert self.take([token])
            if self._matcher.complete:
                return
        raise AssertionError(f"no end: {self.text}")

    @property
    def text(self) -> str:
        return self._follower.tokenizer.decode(self.output, skip_special_tokens=False)


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Follower:
    return Follower(tmp_path_factory.mktemp("grammars"))


def read(text: str, reasoning: ReasoningFormat, tools: ToolFormat, place: Place = "before") -> WholeAnswer:
    thoughts, parser = FORMATS.get(reasoning), PARSERS.get(tools)
    calls = parser(FUNCTIONS, parallel=True, whole=True) if parser is not None else None
    reader = AnswerReader(thoughts(place) if thoughts is not None else None, calls)
    return put_together([*reader.push(text), *reader.end()])


def check_calls(answer: WholeAnswer, names: set[str]) -> None:
    assert answer.content == ""
    assert answer.calls
    for call in answer.calls:
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), FUNCTIONS[call["function"]["name"]])


@pytest.mark.parametrize("tools", PARSERS)
@pytest.mark.parametrize("named", [True, False])
def test_required_calls_are_those_that_the_parser_reads(follower: Follower, tools: ToolFormat, named: bool) -> None:
    functions = {"book": FUNCTIONS["book"]} if named else FUNCTIONS
    rules = PARSERS[tools].rules(CallRules(functions, not named, follower.lark))
    for seed in range(4):
        walk = follower.start(GrammarKind.LARK, rules)
        assert follower.end not in walk.allowed
        walk.wander(random.Random(seed))
        answer = read(walk.text, "none", tools)
        check_calls(answer, set(functions))
        assert len(answer.calls) == 1 or not named


@pytest.mark.parametrize("tools", PARSERS)
@pytest.mark.parametrize("schema", [MANY, REFERRING])
def test_rules_far_longer_than_the_schema_are_refused(follower: Follower, tools: ToolFormat, schema: Any) -> None:
    """A message of megabytes would end the stream to a pod, and with it the requests of everybody on it."""
    rules = ""
    with suppress(ApiError):
        rules = PARSERS[tools].rules(CallRules({"f": schema}, True, follower.lark))
    assert len(rules) < 2 * MAX_RULES_CHARS


def test_required_calls_can_be_written_without_tokens_for_the_markers(tmp_path: Path) -> None:
    follower = Follower(tmp_path, marked=False)
    for tools, parser in PARSERS.items():
        walk = follower.start(GrammarKind.LARK, parser.rules(CallRules(FUNCTIONS, True, follower.lark)))
        walk.wander(random.Random(tools))
        check_calls(read(walk.text, "none", tools), set(FUNCTIONS))


TEXTS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


@pytest.mark.parametrize("tools", ["deepseek_v32", "deepseek_v4", "minimax", "step3", "seed_oss", "qwen3_coder", "glm"])
@pytest.mark.parametrize("marked", [True, False])
def test_strings_may_hold_beginnings_of_tags(tmp_path: Path, tools: ToolFormat, marked: bool) -> None:
    follower = Follower(tmp_path, marked)
    parser = PARSERS[tools]
    walk = follower.start(GrammarKind.LARK, parser.rules(CallRules({"say": TEXTS}, False, follower.lark)))
    text = OPENED[tools] + 'a < b </ </p> "\\n\\'
    assert walk.write(text)
    assert walk.write(CLOSED[tools])
    reader = parser({"say": TEXTS}, parallel=True, whole=True)
    [call] = put_together([*reader.push(walk.text), *reader.end()]).calls
    assert json.loads(call["function"]["arguments"]) == {"text": 'a < b </ </p> "\\n\\'}


# A call of `say` up to its text, and behind it.
OPENED = {
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="say">\n'
    '<｜DSML｜parameter name="text" string="true">',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="say">\n<｜DSML｜parameter name="text" string="true">',
    "minimax": '<minimax:tool_call>\n<invoke name="say">\n<parameter name="text">',
    "step3": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="say">\n'
    '<steptml:parameter name="text">',
    "seed_oss": "<seed:tool_call>\n<function=say>\n<parameter=text>",
    "qwen3_coder": "<tool_call>\n<function=say>\n<parameter=text>\n",
    "glm": "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>",
}
CLOSED = {
    "deepseek_v32": "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek_v4": "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "minimax": "</parameter>\n</invoke>\n</minimax:tool_call>",
    "step3": "</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    "seed_oss": "</parameter>\n</function>\n</seed:tool_call>",
    "qwen3_coder": "\n</parameter>\n</function>\n</tool_call>",
    "glm": "</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("tools", PARSERS)
def test_text_that_is_no_call_is_not_allowed(follower: Follower, tools: ToolFormat) -> None:
    rules = PARSERS[tools].rules(CallRules(FUNCTIONS, True, follower.lark))
    assert not follower.start(GrammarKind.LARK, rules).write("I would rather talk.")


# What a model writes around its thoughts, before them and behind them.
MARKS: dict[ReasoningFormat, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma": ("<|channel>thought", "<channel|>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "think_response": ("<think>", "</think>"),
    "hunyuan": ("<think>", "</think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}
OPENING = {"harmony": "<|channel|>final<|message|>"}


def around(follower: Follower, reasoning: ReasoningFormat, place: Place, budget: int | None, opening: str) -> str:
    rules = FORMATS[reasoning].thoughts_rules(place, budget, follower.lark)
    return f"start: thoughts {follower.lark.spell(opening) if opening else ''} @answer\n{rules}"


@pytest.mark.parametrize(
    ("reasoning", "place"),
    [("think", "before"), ("think", "inside"), ("mistral", "before"), ("gemma", "before"), ("harmony", "before")],
)
@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.EBNF, GrammarKind.REGEX, GrammarKind.CHOICE])
def test_a_grammar_applies_to_the_answer_and_not_to_the_thoughts(
    follower: Follower, reasoning: ReasoningFormat, place: Place, kind: GrammarKind
) -> None:
    texts = {
        GrammarKind.JSON_SCHEMA: json.dumps(ANSWER),
        GrammarKind.EBNF: 'root ::= "{\\"a\\":" [0-9] "}"',
        GrammarKind.REGEX: r'\{"a":[0-9]\}',
        GrammarKind.CHOICE: json.dumps(['{"a":1}', '{"a":2}']),
    }
    begin, finish = MARKS[reasoning]
    opening = OPENING.get(reasoning, "")
    rules = around(follower, reasoning, place, None, opening)
    rng = random.Random(1)
    with_thoughts = follower.start(kind, texts[kind], rules)
    assert with_thoughts.write("" if place == "inside" else begin)
    assert with_thoughts.write('Is it {"a": or <tool_call>? 🎉' + "".join(rng.choices("abc {}\n", k=20)))
    assert follower.end not in with_thoughts.allowed
    assert with_thoughts.write(finish + opening)
    with_thoughts.wander(rng)
    answer = read(with_thoughts.text, reasoning, "none", place)
    assert answer.thoughts.startswith("Is it {")
    jsonschema.validate(json.loads(answer.content), ANSWER)
    assert not follower.start(kind, texts[kind], rules).write(f"{begin if place == 'before' else ''}Hm.{finish}no")
    without = follower.start(kind, texts[kind], rules)
    if place == "before":
        assert without.write(opening + '{"a":1}')
        assert follower.end in without.allowed


@pytest.mark.parametrize(
    ("reasoning", "tools"), [("think", "hermes"), ("think", "glm"), ("harmony", "harmony"), ("mistral", "mistral")]
)
def test_required_calls_come_after_the_thoughts(
    follower: Follower, reasoning: ReasoningFormat, tools: ToolFormat
) -> None:
    rules = PARSERS[tools].rules(CallRules(FUNCTIONS, True, follower.lark))
    begin, finish = MARKS[reasoning]
    walk = follower.start(GrammarKind.LARK, rules, around(follower, reasoning, "before", None, ""))
    assert walk.write(f"{begin}I must call.{finish}")
    walk.wander(random.Random(2))
    answer = read(walk.text, reasoning, tools)
    assert answer.thoughts == "I must call."
    check_calls(answer, set(FUNCTIONS))


@pytest.mark.parametrize("reasoning", FORMATS)
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 12])
def test_thoughts_end_when_their_budget_is_used_up(
    follower: Follower, reasoning: ReasoningFormat, free: bool, budget: int
) -> None:
    thoughts = FORMATS[reasoning]
    begin, finish = (follower.ids(text) for text in MARKS[reasoning])
    if free:
        rules = thoughts.free_rules("before", follower.lark)
        walk = follower.start(GrammarKind.LARK, f"{rules}\n{thoughts.thoughts_rules('before', budget, follower.lark)}")
    else:
        rules = around(follower, reasoning, "before", budget, OPENING.get(reasoning, ""))
        walk = follower.start(GrammarKind.JSON_SCHEMA, json.dumps(ANSWER), rules)
    assert walk.take(begin)
    rng = random.Random(budget)
    for _ in range(budget):
        assert len(walk.allowed) > 400
        assert walk.take([rng.choice(sorted(walk.allowed - set(finish)))])
    assert walk.allowed == {finish[0]}
    assert walk.take(finish)
    if free:
        assert walk.write(OPENING.get(reasoning, "") + "It is sunny.")
        assert follower.end in walk.allowed
        again = follower.ids(begin and MARKS[reasoning][0])
        assert reasoning == "harmony" or again[0] not in walk.allowed
    else:
        assert walk.write(OPENING.get(reasoning, "") + '{"a":1}')


@pytest.mark.parametrize("reasoning", FORMATS)
def test_with_a_budget_the_model_need_not_think(follower: Follower, reasoning: ReasoningFormat) -> None:
    thoughts = FORMATS[reasoning]
    rules = f"{thoughts.free_rules('before', follower.lark)}\n{thoughts.thoughts_rules('before', 3, follower.lark)}"
    walk = follower.start(GrammarKind.LARK, rules)
    assert walk.write(OPENING.get(reasoning, "") + "It is sunny.[TOOL_CALLS]")
    assert follower.end in walk.allowed


def test_markers_that_are_no_tokens_are_text(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lark = ModelTokenizer(tokenizer).lark
    grammars = Grammars(tmp_path, VOCABULARY)
    rules = FORMATS["think"].thoughts_rules("before", None, lark)
    matcher = grammars.compile(
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(ANSWER), around=f"start: thoughts @answer\n{rules}")
    ).result()
    for text, allowed in (('<think>Hm. {}</think>{"a":1}', True), ('{"a":1}', True), ("<think></think>no", False)):
        assert matcher.copy().follow(tokenizer.encode(text, add_special_tokens=False).ids) is allowed
    with pytest.raises(ValueError, match="not a token"):
        FORMATS["think"].thoughts_rules("before", 3, lark)


def test_what_stands_around_is_checked(follower: Follower) -> None:
    with pytest.raises(GrammarError):
        follower.start(GrammarKind.JSON_SCHEMA, json.dumps(ANSWER), "start: nothing")
