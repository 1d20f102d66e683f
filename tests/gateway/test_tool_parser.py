"""Calls that models write by themselves, from any pieces of text."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_gateway.reading.parts import Part
from baton_gateway.tools.hermes import HermesParser
from baton_gateway.tools.llama3 import Llama3Parser
from baton_gateway.tools.mistral import MistralParser
from baton_gateway.tools.tool_formats import PARSERS, find_parser
from baton_gateway.tools.tool_parser import ToolParser

NAMES: dict[str, Any] = {"weather": None, "get_time": None}
ARGUMENTS = '{"city": "Köln \\"}] , {\\\\ </tool_call>", "more": [{"a": {}}]}'
FORMATS = [HermesParser, MistralParser, Llama3Parser]


def parsed(
    kind: type[ToolParser], texts: list[str], *, whole: bool = False, parallel: bool = True
) -> tuple[str, list[list[str]], int]:
    """Return content, (name, arguments) of each call, and how many are complete."""
    parser = kind(NAMES, parallel=parallel, whole=whole)
    parts: list[Part] = [part for text in texts for part in parser.push(text)]
    parts += parser.end()
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, str):
            continue
        if "id" in part:
            assert (part["index"], part["type"], part["function"]["arguments"]) == (len(calls), "function", "")
            calls.append([part["function"]["name"], ""])
        else:
            assert set(part) == {"index", "function"}
            assert part["index"] == len(calls) - 1
            calls[-1][1] += part["function"]["arguments"]
    return "".join(part for part in parts if isinstance(part, str)), calls, parser.count


def test_space_in_a_call_is_looked_at_once() -> None:
    parser = PARSERS["pythonic"](NAMES, parallel=True, whole=False)
    parser.push("[weather(")
    began = time.process_time()
    for _ in range(2000):
        parser.push(" " * 500)
    assert time.process_time() - began < 2
    parser.push("days=1)]")
    assert parser.count == 1


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        ("hermes", r'<tool_call>{"arguments": {"a": "\ud83d"}, "name": "weather"}</tool_call>', {"a": "\ufffd"}),
        ("mistral", r'[TOOL_CALLS][{"arguments": {"\udc00": "\\ud83d"}, "name": "weather"}]', {"\ufffd": r"\ud83d"}),
        ("gemma", r'<|tool_call>call:weather{a:"\ud83d\ude00\ud83d"}<tool_call|>', {"a": "😀\ufffd"}),
        ("pythonic", r"[weather(a='\ud83d')]", {"a": "\ufffd"}),
        ("pythonic", r'[weather(a="\ud83d", b=1e9)]', {"a": "\ufffd", "b": 1e9}),
        ("qwen3_coder", "<function=weather><parameter=a>NaN</parameter></function>", {"a": "NaN"}),
        ("pythonic", "[weather(a=NaN)]", None),
        ("pythonic", "[weather(a=[1e999, 'x'])]", None),
        ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "weather"}</tool_call>', None),
    ],
)
def test_arguments_are_json_in_utf_8(kind: Any, text: str, arguments: Any) -> None:
    content, calls, _ = parsed(PARSERS[kind], [text], whole=True)
    if arguments is None:
        assert (content, calls) == (text, [])
    else:
        calls[0][1].encode()
        assert (content, json.loads(calls[0][1])) == ("", arguments)


def test_what_follows_arguments_is_read_once() -> None:
    parser = HermesParser(NAMES, parallel=True, whole=False)
    parser.push('<tool_call>{"name": "weather", "arguments": {}, "more": ')
    began = time.process_time()
    for _ in range(200):
        parser.push("[{" * 1000)
    assert time.process_time() - began < 2
    parser.push("}]" * 200_000 + "}</tool_call>")
    assert parser.count == 1
    assert parser.push("more") == ["more"]


def test_long_python_is_no_call() -> None:
    text = f"[weather(a=[{'None, ' * 100_000}])]"
    began = time.process_time()
    assert parsed(PARSERS["pythonic"], [text], whole=True)[:2] == (text, [])
    assert time.process_time() - began < 1
    long = "it's \\ " * 20_000
    assert json.loads(parsed(PARSERS["pythonic"], [f"[weather(a=[None, {long!r}])]"])[1][0][1]) == {"a": [None, long]}


def split(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def call(name: str = "weather", arguments: str = ARGUMENTS, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


BOTH = [["weather", ARGUMENTS], ["get_time", "{}"]]
MODELS_TEXTS: list[tuple[type[ToolParser], str, str, list[list[str]]]] = [
    (
        HermesParser,
        f"I look.\n<tool_call>\n{call()}\n</tool_call>\n<tool_call>\n{call('get_time', '{}')}\n</tool_call>",
        "I look.\n",
        BOTH,
    ),
    (HermesParser, f"\n<tool_call>{call()}</tool_call> and more", " and more", BOTH[:1]),
    (HermesParser, f"<tool_call>{call()}", "", BOTH[:1]),
    (HermesParser, f"<tool_call>{call()[:-1]}</tool_call><tool_call>{call('get_time', '{}')}", "", BOTH),
    (MistralParser, f"[TOOL_CALLS] [{call()}, {call('get_time', '{}')}]", "", BOTH),
    (MistralParser, f"Well, [TOOL_CALLS][{call()}]", "Well, ", BOTH[:1]),
    (MistralParser, f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]get_time{{}}", "", BOTH),
    (MistralParser, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]get_time[CALL_ID]a1[ARGS]{{}}", "", BOTH),
    (Llama3Parser, call(key="parameters"), "", BOTH[:1]),
    (Llama3Parser, f"<|python_tag|>{call(key='parameters')}; {call('get_time', '{}', 'parameters')}\n", "", BOTH),
    (Llama3Parser, f"{call()} is what I would call", " is what I would call", BOTH[:1]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), MODELS_TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5, 33, 1000])
@pytest.mark.parametrize("whole", [True, False])
def test_what_models_write(
    kind: type[ToolParser], text: str, content: str, calls: list[list[str]], size: int, whole: bool
) -> None:
    pieces = split(text, [size] * (len(text) // size))
    assert parsed(kind, pieces, whole=whole) == (content, calls, len(calls))
    assert parsed(kind, pieces, whole=whole, parallel=False) == (content, calls[:1], 1)


def test_arguments_come_while_they_are_written() -> None:
    parser = HermesParser(NAMES, parallel=True, whole=False)
    assert parser.push('<tool_call>{"name": "weather", "arguments": ') == []
    begin, first = parser.push('{"city"')
    assert isinstance(begin, dict)
    assert begin["function"] == {"name": "weather", "arguments": ""}
    assert isinstance(first, dict)
    assert first["function"] == {"arguments": '{"city"'}
    assert parser.push(': "Rome"') == [{"index": 0, "function": {"arguments": ': "Rome"'}}]


def test_members_in_another_order_come_at_once() -> None:
    text = '{"type": "function", "parameters": {"city": "Köln"}, "name": "weather"}'
    content, [[name, arguments]], _ = parsed(Llama3Parser, list(text))
    assert (content, name, json.loads(arguments)) == ("", "weather", {"city": "Köln"})


def test_other_members_behind_the_arguments_are_left_out() -> None:
    text = f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}, "id": "}}"}}, {call("get_time", "{}")}]'
    assert parsed(MistralParser, list(text)) == ("", BOTH, 2)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HermesParser, "no call"),
        (HermesParser, " \n"),
        (HermesParser, "a < b, <tool, <tool_cal"),
        (HermesParser, f"<tool_call>{call('unknown')}</tool_call>"),
        (HermesParser, "<tool_call>weather</tool_call>"),
        (HermesParser, '<tool_call>{"name": "weather"}</tool_call>'),
        (HermesParser, '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>'),
        (HermesParser, "<tool_call>\n"),
        (MistralParser, "[TOOL_CALLS] weather in Rome"),
        (MistralParser, "[TOOL_CALLS]unknown{}"),
        (MistralParser, "[TOOL_CALLS] [1, 2]"),
        (Llama3Parser, '{"city": "Rome"}'),
        (Llama3Parser, f"Say {call()}"),
        (Llama3Parser, "<|python_tag|>print(1)"),
        (Llama3Parser, f"[{call()}]"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_no_call_is_content(kind: type[ToolParser], text: str, whole: bool) -> None:
    assert parsed(kind, [text], whole=whole) == (text, [], 0)
    assert parsed(kind, list(text), whole=whole) == (text, [], 0)


@pytest.mark.parametrize("cut", range(12, len("<tool_call>" + call()) - 2))
def test_a_call_that_is_cut_off_is_content_as_far_as_it_was_not_sent(cut: int) -> None:
    full = "<tool_call>" + call()
    text = full[:cut]
    assert parsed(HermesParser, list(text), whole=True) == (text, [], 0)
    content, calls, complete = parsed(HermesParser, list(text))
    assert complete == 0
    assert (content, calls) in ((text, []), ("", [["weather", text[full.index(ARGUMENTS) :]]]))


def test_a_call_whose_arguments_are_no_json_is_content() -> None:
    bad = "<tool_call>" + call(arguments="{city: Rome}") + "</tool_call>"
    good = f"<tool_call>{call('get_time', '{}')}</tool_call>"
    assert parsed(HermesParser, list(bad + good), whole=True) == (bad, [["get_time", "{}"]], 1)
    content, calls, complete = parsed(HermesParser, list(bad + good))
    assert (content, complete) == ("}</tool_call>", 1)
    assert calls == [["weather", "{city: Rome}"], ["get_time", "{}"]]


def test_text_is_not_held_back_needlessly() -> None:
    parser = HermesParser(NAMES, parallel=True, whole=False)
    assert parser.push("a <b") == ["a <b"]
    assert parser.push(" <to") == [" "]
    assert parser.push("p>") == ["<top>"]
    json_answer = Llama3Parser(NAMES, parallel=True, whole=False)
    assert json_answer.push('{"n') == []
    assert json_answer.push('um"') == ['{"num"']


MARKERS = [marker for kind in FORMATS for marker in kind.markers]
WORDS = [
    "{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n", "name", '"name"', '"arguments": ', '"parameters": ', "{}",
    "weather", '"weather"', "get_time", "ü", '{"name": "', '{"a": NaN}', '{"a": 1}', call(), call("get_time", "{}"),
    call(key="parameters"), call("other"), call()[:30], call(arguments="{]}"),
]  # fmt: skip
pieces = st.one_of(st.sampled_from(WORDS), st.sampled_from(MARKERS), st.sampled_from(MARKERS).map(lambda m: m[:4]))
texts = st.lists(pieces | st.text(max_size=4), max_size=14).map("".join)
sizes = st.lists(st.integers(0, 12), max_size=60)


@given(kind=st.sampled_from(FORMATS), text=texts, sizes=sizes, whole=st.booleans(), parallel=st.booleans())
@settings(max_examples=1500, deadline=None)
def test_any_split_gives_the_same(
    kind: type[ToolParser], text: str, sizes: list[int], whole: bool, parallel: bool
) -> None:
    expected = parsed(kind, [text], whole=whole, parallel=parallel)
    assert parsed(kind, split(text, sizes), whole=whole, parallel=parallel) == expected
    assert parsed(kind, list(text), whole=whole, parallel=parallel) == expected
    content, calls, complete = expected
    assert complete <= (len(calls) if parallel else 1)
    assert {name for name, _ in calls} <= set(NAMES)
    if whole:
        assert complete == len(calls)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        assert calls or content == text


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=8), values, max_size=3).map(lambda v: json.dumps(v, ensure_ascii=False))
requests = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), objects), min_size=1, max_size=3)


def written(kind: type[ToolParser], calls: list[tuple[str, str]], named: bool) -> str:
    """Return calls as models write them. named: Mistral's newer way."""
    if kind is HermesParser:
        return "\n".join(f"<tool_call>\n{call(*each)}\n</tool_call>" for each in calls)
    if kind is Llama3Parser:
        return "; ".join(call(*each, "parameters") for each in calls)
    if named:
        return "".join(f"[TOOL_CALLS]{name}{arguments}" for name, arguments in calls)
    return "[TOOL_CALLS] [" + ", ".join(call(*each) for each in calls) + "]"


@given(kind=st.sampled_from(FORMATS), calls=requests, sizes=sizes, named=st.booleans(), whole=st.booleans())
@settings(max_examples=500, deadline=None)
def test_calls_come_out_as_they_were_written(
    kind: type[ToolParser], calls: list[tuple[str, str]], sizes: list[int], named: bool, whole: bool
) -> None:
    pieces = split(written(kind, calls, named), sizes)
    assert parsed(kind, pieces, whole=whole) == ("", [list(each) for each in calls], len(calls))


def test_the_format_is_found_from_the_template() -> None:
    hermes = "{%- for tool in tools %}<tool_call>{{ tool_call.arguments }}</tool_call>"
    llama = '{"name": function name, "parameters": dictionary} <|start_header_id|>ipython<|end_header_id|>'
    assert find_parser("auto", hermes) is HermesParser
    assert find_parser("auto", hermes + "<function=...>") is PARSERS["qwen3_coder"]
    assert find_parser("auto", '{{ "[TOOL_CALLS] [" }}') is MistralParser
    assert find_parser("auto", llama) is Llama3Parser
    assert find_parser("auto", "{{ messages }}") is None
    assert find_parser("auto", None) is None
    assert find_parser("none", hermes) is None
    assert all(find_parser(name, hermes) is kind for name, kind in PARSERS.items())
