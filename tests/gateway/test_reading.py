"""What models of all formats write is read: the same from any pieces, and without losing a character."""

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_gateway.reading.parts import AnswerReader, Part, Thought, put_together
from baton_gateway.reading.text_reader import TextReader
from baton_gateway.reasoning.formats import FORMATS, ReasoningFormat, find_thoughts
from baton_gateway.reasoning.thought_reader import Place
from baton_gateway.tools.tool_formats import PARSERS, ToolFormat, find_parser

from .model_outputs import FUNCTIONS, OUTPUTS, Output

Read = tuple[str, str, list[tuple[str, str]], int]
REASONING: list[ReasoningFormat] = [*FORMATS, "none"]
TOOLS: list[ToolFormat] = [*PARSERS, "none"]


def make_reader(
    reasoning: ReasoningFormat,
    tools: ToolFormat,
    place: Place = "before",
    *,
    whole: bool = False,
    parallel: bool = True,
) -> AnswerReader:
    thoughts, parser = FORMATS.get(reasoning), PARSERS.get(tools)
    calls = parser(FUNCTIONS, parallel=parallel, whole=whole) if parser is not None else None
    return AnswerReader(thoughts(place) if thoughts is not None else None, calls)


def read(reader: AnswerReader, pieces: list[str]) -> Read:
    """Return thoughts, content, calls and how many calls are complete."""
    parts: list[Part] = [part for piece in pieces for part in reader.push(piece)]
    answer = put_together([*parts, *reader.end()])
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.calls]
    return answer.thoughts, answer.content, calls, reader.calls


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("whole", [True, False])
def test_recorded_outputs_are_read_the_same_from_any_pieces(name: str, whole: bool) -> None:
    output = OUTPUTS[name]
    text = output.text

    def again() -> AnswerReader:
        return make_reader(output.reasoning, output.tools, output.place, whole=whole)

    expected = thoughts, content, calls, count = read(again(), [text])
    assert (thoughts, content) == (output.thoughts, output.content)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == output.calls
    assert count == len(output.calls)
    assert read(again(), list(text)) == expected
    for at in range(len(text)):
        assert read(again(), [text[:at], text[at:]]) == expected


@pytest.mark.parametrize("name", [name for name, output in OUTPUTS.items() if len(output.calls) > 1])
def test_without_parallel_calls_the_first_one_is_read(name: str) -> None:
    output = OUTPUTS[name]
    _, _, calls, count = read(make_reader(output.reasoning, output.tools, output.place, parallel=False), [output.text])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == output.calls[:1]
    assert count == 1


class Traced:
    """Records what readers do with each character of a text."""

    def __init__(self, reader: AnswerReader) -> None:
        self.seen: list[tuple[str, str]] = []
        for part in (reader._thoughts, reader._calls):
            if isinstance(part, TextReader):
                self._follow(part, passes_on=part is reader._thoughts and reader._calls is not None)

    def _follow(self, reader: Any, passes_on: bool) -> None:
        def seen(method: Any, kind: str, text_of: Any) -> Any:
            def wrapped(*given: Any) -> Any:
                self.seen.append((kind, text_of(*given)))
                return method(*given)

            return wrapped

        reader.plain = lambda text: None  # the short way for texts without marks
        reader._drop = seen(reader._drop, "dropped", lambda count: reader._rest[:count])
        reader._add_thought = seen(reader._add_thought, "thought", lambda text: text)
        if not passes_on:
            reader._add_content = seen(reader._add_content, "content", lambda text: text)
        if hasattr(reader, "_end_call"):
            reader._end_call = seen(reader._end_call, "call", lambda _: "".join(reader._source))
            # A call that was held back becomes content.
            broken = seen(
                reader._break_call, "call", lambda: "" if reader._kept is not None else "".join(reader._source)
            )
            reader._break_call = broken


def dropped_marks(reasoning: ReasoningFormat, tools: ToolFormat) -> re.Pattern[str]:
    """Return a pattern of what readers may leave out: white space, markers, headers, and what closes calls."""
    kinds: list[Any] = [kind for kind in (FORMATS.get(reasoning), PARSERS.get(tools)) if kind is not None]
    markers = {marker for kind in kinds for marker in kind.markers} | {"</tool_call>", "```", "<|channel>thought"}
    markers |= {kind.section_end for kind in kinds if hasattr(kind, "section_end")}
    # Of a header with which a text breaks off, there may be a part only.
    role = r"(?:<\|start\|>)?\s*(?:a[sitan]{0,8})?(?:\s*t(?:o(?:=[^<]*)?)?)?\s*"
    header = rf"{role}(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?"
    closing = r"[\s}\],]|,.*\}" if tools not in ("none", "harmony") else r"\s"
    return re.compile(f"(?:{'|'.join(map(re.escape, sorted(markers)))}|{header}(?:<\\|message\\|>)?|{closing})*", re.S)


def check_nothing_is_lost(text: str, reasoning: ReasoningFormat, tools: ToolFormat, place: Place, whole: bool) -> None:
    reader = make_reader(reasoning, tools, place, whole=whole)
    traced = Traced(reader)
    read(reader, list(text))
    assert "".join(sorted("".join(part for _, part in traced.seen))) == "".join(sorted(text))
    dropped = dropped_marks(reasoning, tools)
    for kind, part in traced.seen:
        assert kind != "dropped" or dropped.fullmatch(part), part


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("whole", [True, False])
def test_thoughts_content_calls_and_markers_add_up_to_the_text(name: str, whole: bool) -> None:
    output = OUTPUTS[name]
    check_nothing_is_lost(output.text, output.reasoning, output.tools, output.place, whole)


KINDS: list[Any] = [*FORMATS.values(), *PARSERS.values()]
MARKERS = sorted({marker for kind in KINDS for marker in kind.markers})
WORDS = [
    "<think>", "</think>", "<|channel>thought", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
    "<|start|>assistant", " to=functions.get_time", "assistant", "to=", "commentary", "json", "<function=get_time>",
    "<function=get_weather>", "<parameter=city>", "</parameter>", "<parameter=days>", "</function>", "get_time",
    "get_weather", "call:get_weather", "{city:", "[get_time(", "[get_weather(", "city=", "'Rome'", ")", "]", "[", "{",
    "}", ",", ":", ";", '"', "'", "\\", "\n", " ", "functions.get_time:0", "function", "\n```json\n", "\n```", "{}",
    '<invoke name="get_time">', '<parameter name="city">', "</invoke>", '<｜DSML｜invoke name="get_weather">',
    '<｜DSML｜parameter name="days" string="false">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", "functools",
    "<response>", "</answer>", "Here is my", '{"name": "get_time", "arguments": ', '{"city": "Rome"}', "ü", "5", "null",
]  # fmt: skip
_beginnings = st.sampled_from([*MARKERS, *WORDS]).flatmap(
    lambda word: st.integers(1, len(word)).map(lambda n: word[:n])
)
_recorded = st.sampled_from([output.text for output in OUTPUTS.values()])
_cut = st.tuples(_recorded, st.integers(0, 200), st.integers(0, 200)).map(lambda t: t[0][t[1] : t[1] + t[2]])
_pieces = st.sampled_from(MARKERS) | st.sampled_from(WORDS) | _beginnings | _cut | st.text(max_size=4)
broken_outputs = st.lists(_pieces, max_size=14).map("".join)
formats = st.one_of(
    st.tuples(st.sampled_from(REASONING), st.sampled_from(TOOLS)).filter(lambda kinds: kinds != ("none", "none")),
    st.sampled_from([(output.reasoning, output.tools) for output in OUTPUTS.values()]),
)
places: Any = st.sampled_from(["before", "inside", "after"])
sizes = st.lists(st.integers(0, 12), max_size=60)


def split(text: str, lengths: list[int]) -> list[str]:
    pieces, at = [], 0
    for length in lengths:
        pieces.append(text[at : at + length])
        at += length
    return [*pieces, text[at:]]


@given(text=broken_outputs, kinds=formats, place=places, lengths=sizes, whole=st.booleans())
@settings(max_examples=700, deadline=None)
def test_broken_output_is_read_the_same_from_any_pieces(
    text: str, kinds: tuple[ReasoningFormat, ToolFormat], place: Place, lengths: list[int], whole: bool
) -> None:
    expected = read(make_reader(*kinds, place, whole=whole), [text])
    assert read(make_reader(*kinds, place, whole=whole), split(text, lengths)) == expected
    assert read(make_reader(*kinds, place, whole=whole), list(text)) == expected
    _, _, calls, count = expected
    assert {name for name, _ in calls} <= set(FUNCTIONS)
    if whole:
        assert count == len(calls)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@given(text=broken_outputs, kinds=formats, place=places, whole=st.booleans())
@settings(max_examples=700, deadline=None)
def test_broken_output_loses_no_character(
    text: str, kinds: tuple[ReasoningFormat, ToolFormat], place: Place, whole: bool
) -> None:
    check_nothing_is_lost(text, *kinds, place, whole)


def test_text_is_passed_on_as_it_comes() -> None:
    reader = make_reader("think", "qwen3_coder")
    assert reader.push("<think>\nI") == [Thought("I")]
    assert reader.thinking
    assert reader.push(" see.\n</") == [Thought(" see.")]
    assert reader.push("b>") == [Thought("\n</b>")]
    assert reader.push("</think>\n\nIt") == ["It"]
    assert not reader.thinking
    parts = reader.push("<tool_call>\n<function=write_file>\n<parameter=path>\na.p")
    assert [part["function"] for part in parts if isinstance(part, dict)] == [
        {"name": "write_file", "arguments": ""}, {"arguments": '{"path": '}, {"arguments": '"'}, {"arguments": "a.p"},
    ]  # fmt: skip


TEMPLATES: list[tuple[str, ReasoningFormat, ToolFormat]] = [
    ("{{ '<|im_start|>' }}<tool_call>{{ x }}</tool_call>{% if '</think>' in content %}", "think", "hermes"),
    ("<function=example_function_name>\n<parameter=p>\n<tool_call>", "none", "qwen3_coder"),
    ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
    ("[TOOL_CALLS][THINK]{{ block['thinking'] }}[/THINK]", "mistral", "mistral"),
    ("<|channel>thought\n<channel|><|tool_call>call:{{ name }}<tool_call|>", "gemma", "gemma"),
    ("<think></think><tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>", "think", "glm"),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json\n{{ arguments }}", "none", "deepseek_v3"),
    ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜></think>", "think", "deepseek"),
    ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "none", "kimi"),
    ("<|tool_call|>{{ calls }}", "none", "granite"),
    ("<function_call> {{ call }}", "none", "granite_20b"),
    ("<|python_start|>{{ calls }}<|python_end|>", "none", "pythonic"),
    ("<｜DSML｜function_calls>{{ message.tool_calls }}</think>", "think", "deepseek_v32"),
    ("<｜DSML｜tool_calls>{{ message.tool_calls }}</think>", "think", "deepseek_v4"),
    ("<minimax:tool_call>\n<invoke name={{ name }}><think>\n{{ x }}\n</think>", "think", "minimax"),
    ("<｜tool_calls_begin｜>{{ x }}<steptml:invoke name={{ name }}>", "none", "step3"),
    ("<seed:think></seed:think><seed:tool_call>\n<function=example>", "seed_oss", "seed_oss"),
    ("<longcat_tool_call>{{ x }}</longcat_tool_call><longcat_think>", "longcat", "longcat"),
    ("List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>", "none", "lfm2"),
    ("<|system|>{{ content }}<|tool|>{{ tools }}<|/tool|><|end|>", "none", "phi4_mini"),
    ("<think></think><TOOLCALL>{{ calls }}</TOOLCALL><AVAILABLE_TOOLS>", "think", "nemotron"),
    ("<function_calls>{{ calls }}</function_calls>", "none", "olmo3"),
    ("<think>{{ x }}</think><answer>{{ y }}</answer><tool_calls>", "hunyuan", "hunyuan"),
    ("'Here is my thought process:' 'Here is my response:' <|tool_call|>", "granite", "granite"),
    ("between <think></think> and between <response></response> <|tool_call|>", "think_response", "granite"),
    ("{{ messages }}", "none", "none"),
]


@pytest.mark.parametrize(("template", "reasoning", "tools"), TEMPLATES)
def test_formats_are_found_from_the_template(template: str, reasoning: ReasoningFormat, tools: ToolFormat) -> None:
    assert find_thoughts("auto", template) is FORMATS.get(reasoning)
    assert find_parser("auto", template) is PARSERS.get(tools)
    assert find_thoughts("none", template) is None
    assert all(find_thoughts(name, template) is kind for name, kind in FORMATS.items())


def test_every_format_is_recorded() -> None:
    assert {output.tools for output in OUTPUTS.values()} == set(TOOLS)
    assert {output.reasoning for output in OUTPUTS.values()} == set(REASONING)
    assert all(isinstance(output, Output) for output in OUTPUTS.values())


@pytest.mark.parametrize(
    ("reasoning", "tools", "text", "rest"),
    [
        ("think", "none", "<think>\nWell", "</think>"),
        ("granite", "none", "Here is my thought process: Well", "Here is my response:"),
        ("hunyuan", "none", "<answer>Well", "</answer>"),
        ("none", "pythonic", "[get_weather(city", '="Rome")]'),
        ("none", "gemma", "<|tool_call>call:get_weather", "{}<tool_call|>"),
    ],
)
def test_space_that_a_model_repeats_is_looked_at_once(
    reasoning: ReasoningFormat, tools: ToolFormat, text: str, rest: str
) -> None:
    pieces = [text, *["\n" * 500] * 2000, "end", rest]
    began = time.process_time()
    found = read(make_reader(reasoning, tools), pieces)
    assert time.process_time() - began < 2
    assert found == read(make_reader(reasoning, tools), ["".join(pieces)])
