"""Output that must follow a grammar, from a model with random weights, which would follow no grammar by itself."""

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from llguidance import LLParserLimits

from baton_engine.delta import Delta
from baton_engine.engine import Engine
from baton_engine.grammars import GrammarError, Grammars
from baton_engine.masks import Masks
from baton_engine.matcher import Matcher
from baton_engine.sampling import MOST_GRAMMAR_CHARS, Grammar, GrammarKind
from baton_engine.sequence import FinishReason, Request, Sequence, State
from baton_tokenizer.load import load_tokenizer
from tests.models import END, make_model, make_tokenizer
from tests.tokenizers.samples import LLAMA, train_sentencepiece

from .handover import Pair
from .harness import Transcript, assert_idle, finish, generate, make_engine, make_prompt, make_request
from .test_cuda_runner import pretend

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.convert_tokens_to_ids(END)
# At least 25: fewer need too few blocks for a preemption beside a whole sequence.
SEEDS = int(os.environ.get("GRAMMAR_SEEDS") or 25)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "here": {"type": "boolean"}},
            "required": ["zip", "here"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}


def grammar(kind: GrammarKind, text: Any) -> Grammar:
    return Grammar(kind, text if isinstance(text, str) else json.dumps(text), "response_format")


def constrained(id: int, length: int = 20, **fields: Any) -> Request:
    """Return a request for JSON under SCHEMA."""
    defaults = {"max_tokens": 400, "temperature": 1.0, "seed": id, "eos_token_ids": [EOS]}
    rule = grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
    return make_request(id, make_prompt(length, seed=id), **{**defaults, "grammar": rule, **fields})


def free(id: int, **fields: Any) -> Request:
    return make_request(id, make_prompt(20, seed=id), 40, temperature=1.0, seed=id, **fields)


def text_of(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


def assert_valid(transcript: Transcript, keys: set[tuple[int, int]]) -> None:
    assert set(transcript.tokens) >= keys
    for key in keys:
        assert transcript.reasons[key] is FinishReason.STOP, key
        jsonschema.validate(json.loads(text_of(transcript.tokens[key])), SCHEMA)


def run(engine: Engine, *requests: Request) -> Transcript:
    transcript = generate(engine, list(requests))
    assert_idle(engine)
    return transcript


@pytest.mark.soak
def test_every_output_is_valid_and_the_requests_beside_it_do_not_notice(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=1500)
    beside = [free(1000 + id, n=2, logprobs=2) for id in range(5)]
    alone = run(make_engine(llama, num_blocks=1500), *beside)
    transcript = run(engine, *(constrained(id, n=3) for id in range(SEEDS)), *beside)
    assert_valid(transcript, {(id, choice) for id in range(SEEDS) for choice in range(3)})
    assert len({text_of(tokens) for (id, _), tokens in transcript.tokens.items() if id < SEEDS}) > 2.5 * SEEDS
    for key, tokens in alone.tokens.items():
        assert transcript.tokens[key] == tokens


@pytest.mark.parametrize(
    "schema",
    [
        {
            "anyOf": [
                {"type": "integer"},
                {"type": "null"},
                {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            ]
        },
        {"type": "number", "minimum": -3, "exclusiveMaximum": 2.5},
        {"type": "string", "format": "date"},
        {"type": "string", "minLength": 3, "maxLength": 5},
        {
            "type": "object",
            "properties": {"value": {"const": {"a": [1, "é\n"]}}, "next": {"$ref": "#/$defs/leaf"}},
            "required": ["value"],
            "additionalProperties": False,
            "$defs": {"leaf": {"type": "array", "prefixItems": [{"enum": ["x", None, 1.5]}], "items": False}},
        },
        {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9, "minimum": 0}, "maxProperties": 2},
        {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 20}]},
    ],
    ids=["anyOf", "number", "date", "length", "ref", "map", "allOf"],
)
def test_schemas_of_many_kinds(llama: Path, schema: dict[str, Any]) -> None:
    rule = grammar(GrammarKind.JSON_SCHEMA, schema)
    transcript = run(make_engine(llama, num_blocks=600), *(constrained(id, grammar=rule) for id in range(20)))
    for key, tokens in transcript.tokens.items():
        # Numbers and keys may be as long as they like.
        if transcript.reasons[key] is FinishReason.STOP:
            jsonschema.validate(json.loads(text_of(tokens)), schema)
    assert sum(reason is FinishReason.STOP for reason in transcript.reasons.values()) >= 15


@pytest.mark.soak
def test_through_preemption(llama: Path) -> None:
    requests = [constrained(id, length=10) for id in range(SEEDS)]
    expected = run(make_engine(llama, num_blocks=3000, block_size=4), *requests).tokens
    engine = make_engine(llama, block_size=4, num_blocks=6 * SEEDS, max_model_len=512)
    transcript = run(engine, *requests)
    assert engine.load().preemptions > 3
    assert transcript.tokens == expected
    assert_valid(transcript, {(id, 0) for id in range(SEEDS)})


@pytest.mark.soak
def test_through_a_continuation(llama: Path) -> None:
    whole = run(make_engine(llama, num_blocks=1500), *(constrained(id, n=2) for id in range(SEEDS)))
    going_on = []
    for id, choice in whole.tokens:
        old, tokens = constrained(id), whole.tokens[id, choice]
        done = (id * 7 + choice) % len(tokens)
        going_on.append(msgspec.structs.replace(old, id=2 * id + choice, output=tokens[:done], choice=choice))
    rest = run(make_engine(llama, num_blocks=1500), *going_on)
    for (id, choice), tokens in whole.tokens.items():
        assert rest.tokens[2 * id + choice, choice] == tokens
        assert rest.reasons[2 * id + choice, choice] is FinishReason.STOP


@pytest.mark.soak
def test_through_a_hand_over(llama: Path) -> None:
    requests = [constrained(id, n=3) for id in range(SEEDS)]
    pair = Pair(make_engine(llama, num_blocks=1500), make_engine(llama, num_blocks=1500), seed=3)
    for request in requests:
        pair.add(request)
    transcript = pair.run()
    assert_valid(transcript, {(id, choice) for id in range(SEEDS) for choice in range(3)})
    assert transcript.tokens == run(make_engine(llama, num_blocks=1500), *requests).tokens
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


def test_on_a_gpu_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [constrained(id) for id in range(5)]
    expected = run(make_engine(llama), *requests, free(9)).tokens
    pretend(monkeypatch)
    engine = make_engine(llama, max_num_batched_tokens=32)
    assert run(engine, *requests, free(9)).tokens == expected


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        (GrammarKind.REGEX, "[a-c]{2,5}x", "[a-c]{2,5}x"),
        (GrammarKind.CHOICE, ["yes", "no", 'a "quoted" | word', "line\nbreak", "naïve 日本 🎊", "\x7f\t"], None),
        (GrammarKind.EBNF, 'start: "<" word ("," word)* ">"\nword: /[a-f]{1,4}/', r"<[a-f]{1,4}(,[a-f]{1,4})*>"),
        (GrammarKind.EBNF, 'root ::= "<" [0-9] [0-9]? ">"', "<[0-9]{1,2}>"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_the_other_kinds(llama: Path, kind: GrammarKind, text: Any, pattern: str | None) -> None:
    requests = [constrained(id, grammar=grammar(kind, text)) for id in range(20)]
    transcript = run(make_engine(llama), *requests)
    for request in requests:
        said = text_of(transcript.tokens[request.id, 0])
        assert said in text if pattern is None else re.fullmatch(pattern, said)
        assert transcript.reasons[request.id, 0] is FinishReason.STOP


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_of_functions(llama: Path, parallel: bool) -> None:
    functions = {
        "pick": {
            "type": "object",
            "properties": {"color": {"$ref": "#/$defs/color"}},
            "required": ["color"],
            "additionalProperties": False,
            "$defs": {"color": {"enum": ["red", "green"], "description": '} quoted " \n'}},
        },
        "wait": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    rule = grammar(GrammarKind.TOOL_CALLS, {"functions": functions, "parallel": parallel})
    counts = set()
    transcript = run(make_engine(llama), *(constrained(id, grammar=rule) for id in range(20)))
    for key, tokens in transcript.tokens.items():
        if transcript.reasons[key] is FinishReason.STOP:
            calls = json.loads(text_of(tokens))
            counts.add(len(calls))
            for call in calls:
                assert set(call) == {"name", "arguments"}
                jsonschema.validate(call["arguments"], functions[call["name"]])
    assert min(counts) == 1
    assert (max(counts) > 1) == parallel


def test_any_json_object(llama: Path) -> None:
    rule = grammar(GrammarKind.JSON_OBJECT, "")
    transcript = run(make_engine(llama), *(constrained(id, grammar=rule, max_tokens=300) for id in range(20)))
    ended = [key for key, reason in transcript.reasons.items() if reason is FinishReason.STOP]
    assert ended
    for key in ended:
        assert isinstance(json.loads(text_of(transcript.tokens[key])), dict)


def test_thousands_of_choices(llama: Path) -> None:
    choices = [f"w{index}" for index in range(5_000)]
    transcript = run(
        make_engine(llama), *(constrained(id, grammar=grammar(GrammarKind.CHOICE, choices)) for id in range(5))
    )
    assert {text_of(tokens) for tokens in transcript.tokens.values()} <= set(choices)


def test_the_end_comes_only_where_the_grammar_has_one(llama: Path) -> None:
    rule = grammar(GrammarKind.REGEX, "(abc)+")
    biased = {"logit_bias": {EOS: 100.0}}
    said = run(make_engine(llama), constrained(0, grammar=rule, **biased)).tokens[0, 0]
    assert (text_of(said), said[-1]) == ("abc", EOS)
    # Without an end token it goes on for as long as it may.
    endless = run(make_engine(llama), constrained(0, grammar=rule, eos_token_ids=[], max_tokens=30, **biased))
    assert endless.reasons[0, 0] is FinishReason.LENGTH
    assert re.match("(abc)+", text_of(endless.tokens[0, 0]))


def test_the_end_of_a_grammar_comes_before_min_tokens(llama: Path) -> None:
    rule = grammar(GrammarKind.REGEX, "abc|x?")
    for id in range(10):
        transcript = run(make_engine(llama), constrained(id, grammar=rule, min_tokens=50, max_tokens=60))
        assert text_of(transcript.tokens[id, 0]) in ("abc", "x", "")
        assert transcript.reasons[id, 0] is FinishReason.STOP


def test_penalties_bias_and_bans_choose_among_what_the_grammar_allows(llama: Path) -> None:
    a, b = TOKENIZER.convert_tokens_to_ids(["a", "b"])
    rule = grammar(GrammarKind.REGEX, "[ab]{8}")
    for fields, expected in (
        ({"bad_words": [[a]]}, "bbbbbbbb"),
        ({"logit_bias": {a: 100.0}}, "aaaaaaaa"),
        ({"allowed_token_ids": [b]}, "bbbbbbbb"),
    ):
        request = constrained(0, grammar=rule, **fields)
        assert text_of(run(make_engine(llama), request).tokens[0, 0]) == expected
    # The grammar wins over a ban on all tokens that it allows.
    request = constrained(0, grammar=rule, allowed_token_ids=[EOS])
    assert re.fullmatch("[ab]{8}", text_of(run(make_engine(llama), request).tokens[0, 0]))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (GrammarKind.JSON_SCHEMA, "no JSON", "not JSON"),
        (GrammarKind.JSON_SCHEMA, {"type": "poem"}, "poem"),
        (GrammarKind.JSON_SCHEMA, {"$ref": "https://example.com/schema"}, "example.com"),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 5_000 + "{}" + "}" * 5_000, "nested too deeply"),
        (GrammarKind.REGEX, "[0-9", "unclosed"),
        (GrammarKind.REGEX, "(" * 30_000 + "a" + ")" * 30_000, "regex"),
        (GrammarKind.REGEX, "a?" * 32_000, "too big"),
        (
            GrammarKind.EBNF,
            "\n".join([f"A{i}:" + f" A{i + 1}" * 10 for i in range(9)] + ["A9: /a?/", "start: A0"]),
            "too",
        ),
        (GrammarKind.EBNF, "\n".join([*(f"r{n} ::= r{n + 1}" for n in range(3000)), "root ::= r0"]), "many rules"),
        (GrammarKind.EBNF, "start: nothing", "nothing"),
        (GrammarKind.EBNF, "root ::= (", ""),
        (99, "", "kind 99"),
    ],
)
def test_a_bad_grammar_is_refused_by_its_field(llama: Path, kind: GrammarKind, text: Any, words: str) -> None:
    engine = make_engine(llama)
    for id in (0, 1):
        request = constrained(id, grammar=grammar(kind, text))
        assert engine.request_error(request) is None
        engine.add(request)
    rejections: list[tuple[int, str, str]] = []
    while engine.has_work:
        rejections += engine.step().rejections
    assert [(id, field) for id, field, _ in rejections] == [(0, "response_format"), (1, "response_format")]
    for _, _, message in rejections:
        assert words in message
        assert len(message) < 400
    assert_idle(engine)


def test_a_long_grammar_is_refused_and_a_deep_one_is_not(llama: Path) -> None:
    engine = make_engine(llama)
    request = constrained(0, grammar=grammar(GrammarKind.REGEX, "a" * (MOST_GRAMMAR_CHARS + 1)))
    error = engine.request_error(request)
    assert error is not None
    assert error[0] == "response_format"
    rules = [f"a{index}: a{index + 1}" for index in range(4_000)]
    deep = grammar(GrammarKind.EBNF, "\n".join(["start: a0", *rules, 'a4000: "b"']))
    assert text_of(run(engine, constrained(0, grammar=deep)).tokens[0, 0]) == "b"


def test_empty_lines_cost_nothing(llama: Path) -> None:
    # The time is that of a thread which keeps the interpreter lock, so that the engine makes no step.
    began = time.process_time()
    rule = grammar(GrammarKind.EBNF, 'root ::= "b"' + "\n" * 50_000)
    assert text_of(run(make_engine(llama), constrained(0, grammar=rule)).tokens[0, 0]) == "b"
    assert time.process_time() - began < 8


def test_compiled_grammars_that_are_large_leave_the_cache_soon(llama: Path) -> None:
    grammars = Grammars(llama, len(TOKENIZER))
    first = grammars.compile(grammar(GrammarKind.REGEX, "first"))
    assert grammars.compile(grammar(GrammarKind.REGEX, "first")) is first
    for index in range(17):
        grammars.compile(grammar(GrammarKind.EBNF, f'start: "{index}"' + " " * 65_000)).result()
    assert grammars.compile(grammar(GrammarKind.REGEX, "first")) is not first


def test_a_grammar_that_becomes_too_complex_is_an_error(llama: Path) -> None:
    # The number of ways to parse the text grows with each letter.
    rule = grammar(GrammarKind.EBNF, 'start: x\nx: x x | "a" | x x x')
    transcript = run(make_engine(llama), constrained(0, grammar=rule, max_tokens=450, eos_token_ids=[]))
    assert transcript.reasons[0, 0] is FinishReason.ERROR


def test_rules_that_refer_to_themselves_at_their_ends_do_not_fill_a_row(llama: Path) -> None:
    # After each "a" the next mask ends all rules, in as many places as there are letters. The time is quadratic.
    rules = "".join(f"\nx{index}: A x{index} | B" for index in range(100))
    text = "start: " + " | ".join(f"x{index}" for index in range(100)) + rules + "\nA: /a/\nB: /b/"
    biased = {"logit_bias": {TOKENIZER.convert_tokens_to_ids("a"): 100.0}, "max_tokens": 200}
    transcript = run(make_engine(llama), constrained(0, grammar=grammar(GrammarKind.EBNF, text), **biased))
    assert transcript.reasons[0, 0] is FinishReason.ERROR
    few = grammar(GrammarKind.EBNF, "start: x\nx: A x | B\nA: /a/\nB: /b/")
    transcript = run(make_engine(llama), constrained(0, grammar=few, **biased))
    assert transcript.reasons[0, 0] is FinishReason.LENGTH


def test_a_lark_grammar_has_a_limited_number_of_parts(llama: Path) -> None:
    schema = {"enum": [f"value {index}" for index in range(2500)]}
    allowed = [
        f"start: %json {json.dumps(schema)} // " + "a | " * 6000,
        "start: WORD\nWORD: " + " | ".join(f'"word{index}"' for index in range(4500)),
        'start: "' + "a | " * 6000 + '" # " | ',
        "start: /" + "a | " * 600 + "/",
    ]
    refused = [
        "start: " + " | ".join(["a"] * 6000) + '\na: b a | b\nb: "b"',
        "start: " + "a? " * 6000 + '\na: b a | b\nb: "b"',
        f"start: a %json {json.dumps(schema)} " + "a? " * 6000 + '\na: b a | b\nb: "b"',
    ]
    grammars = Grammars(llama, len(TOKENIZER))
    for text in allowed:
        assert not grammars.compile(grammar(GrammarKind.EBNF, text)).result(timeout=60).failed
    for text in refused:
        with pytest.raises(GrammarError, match="more than 10000"):
            grammars.compile(grammar(GrammarKind.EBNF, text)).result(timeout=60)


def test_rules_with_parameters_are_refused(llama: Path) -> None:
    # The parser tries all orders of ten elements that may be empty: compiling takes more than a minute.
    orders = "\n    | ".join(f"e some::set_bit({bit}) %if bit_clear({bit})" for bit in range(10))
    texts = [
        f'start: some::0x0\nsome::_: "x" %if is_ones([0:10])\n    | {orders}\ne: "" | "k"',
        'start: "/" some ::0x0 "/"\nsome :: _: "a" some::incr(_) | "b"',
        'start: %lark {\nstart: some::0x0\nsome::_: e some::incr(_) | "b"\ne: "" | "k"\n}',
    ]
    grammars = Grammars(llama, len(TOKENIZER))
    for text in texts:
        with pytest.raises(GrammarError, match="parameters"):
            grammars.compile(grammar(GrammarKind.EBNF, text)).result(timeout=20)
    allowed = 'start: "::" /%if|::/ # some::_ %if\n'
    assert not grammars.compile(grammar(GrammarKind.EBNF, allowed)).result(timeout=60).failed


def test_a_mask_that_takes_too_much_is_an_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_engine.grammars._LIMITS", LLParserLimits(step_lexer_fuel=20, verbose_errors=False))
    rule = grammar(GrammarKind.REGEX, "([a-z]{3,9}|[a-f0-9]{2,20}(xy|z)*){1,9}")
    transcript = run(make_engine(llama), constrained(0, grammar=rule))
    assert transcript.reasons[0, 0] is FinishReason.ERROR


def test_steps_go_on_while_a_grammar_is_compiled(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=600)
    engine.add(free(0))
    transcript = Transcript()
    transcript.take(engine.step().deltas)
    big = {
        "type": "object",
        "properties": {f"p{index}": {"type": "string", "pattern": f"^[a-z]{{1,{index + 1}}}$"} for index in range(200)},
    }
    engine.add(constrained(1, grammar=grammar(GrammarKind.JSON_SCHEMA, big), max_tokens=20))
    deltas: list[Delta] = []
    while not any(delta.id == 1 for delta in deltas):
        deltas += engine.step().deltas
    assert [delta.id for delta in deltas].index(1) > 1
    transcript.take(deltas)
    finish(engine, transcript)
    assert_idle(engine)


def test_a_slow_compilation_does_not_hold_up_others(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_engine.grammars.available_cores", lambda: 2.5)
    released, compile_one = threading.Event(), Grammars._compile

    def compiled(self: Grammars, rule: Grammar) -> Matcher:
        if rule.text == "slow":
            assert released.wait(30)
        return compile_one(self, rule)

    monkeypatch.setattr(Grammars, "_compile", compiled)
    grammars = Grammars(llama, len(TOKENIZER))
    slow = grammars.compile(grammar(GrammarKind.REGEX, "slow"))
    assert not grammars.compile(grammar(GrammarKind.REGEX, "fast")).result(timeout=10).failed
    assert not slow.done()
    released.set()
    slow.result(timeout=10)


def test_tenants_take_turns_for_the_threads(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_engine.grammars.available_cores", lambda: 1.0)
    started, order, compile_one = threading.Semaphore(0), list[str](), Grammars._compile
    released = {salt: threading.Event() for salt in ("many", "few", "some")}

    def compiled(self: Grammars, rule: Grammar) -> Matcher:
        started.release()
        assert released[rule.text.rstrip("0123456789")].wait(30)
        order.append(rule.text)
        return compile_one(self, rule)

    monkeypatch.setattr(Grammars, "_compile", compiled)
    grammars = Grammars(llama, len(TOKENIZER))
    futures = [grammars.compile(grammar(GrammarKind.REGEX, text), text[:3].encode()) for text in ("many0", "some0")]
    assert started.acquire(timeout=10)
    assert started.acquire(timeout=10)  # both threads are busy
    texts = ["many1", "many2", "few0", "few1"]
    futures += [grammars.compile(grammar(GrammarKind.REGEX, text), text[:3].encode()) for text in texts]
    # The first salt already uses as many threads as one salt may, so a thread that ends its work takes another salt's.
    for salt in ("some", "few"):
        released[salt].set()
    for future, text in zip(futures[1:], ("some0", *texts), strict=True):
        if not text.startswith("many"):
            assert not future.result(timeout=10).failed
    assert order == ["some0", "few0", "few1"]
    released["many"].set()
    for future in futures:
        assert not future.result(timeout=10).failed
    assert order[3:] == ["many0", "many1", "many2"]


def test_masks_of_a_vocabulary_that_fills_no_whole_word(llama: Path) -> None:
    vocab = len(TOKENIZER) + 5
    grammars, masks = Grammars(llama, vocab), Masks(vocab)
    a, b = TOKENIZER.convert_tokens_to_ids(["a", "b"])
    sequences = []
    for id, text in enumerate(("a|b", "b", "a?")):
        request = constrained(id, grammar=grammar(GrammarKind.REGEX, text), stop_token_ids=[vocab - 1, vocab + 9])
        sequences.append(Sequence(request, id, 16, 64))
        sequences[-1].matcher = grammars.compile(grammar(GrammarKind.REGEX, text)).result().copy()
    sequences[1].state = State.FINISHED
    bits = np.unpackbits(masks.compute(sequences).view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    assert bits.shape == (3, vocab)
    assert bits[0].nonzero()[0].tolist() == sorted([a, b])
    assert bits[1].all()
    assert bits[2].nonzero()[0].tolist() == sorted([a, EOS, vocab - 1])


def test_a_request_can_leave_while_its_grammar_is_compiled(llama: Path) -> None:
    engine = make_engine(llama)
    engine.add(constrained(0))
    engine.abort(0)
    engine.add(constrained(1))
    transcript = Transcript()
    finish(engine, transcript)
    assert {id for id, _ in transcript.tokens} == {1}
    assert_idle(engine)


def test_a_beginning_that_does_not_follow_the_grammar_is_refused(llama: Path) -> None:
    engine = make_engine(llama)
    engine.add(constrained(0, output=[EOS]))
    rejections: list[tuple[int, str, str]] = []
    while engine.has_work:
        rejections += engine.step().rejections
    assert [(id, field) for id, field, _ in rejections] == [(0, "response_format")]


def without_special_tokens(folder: Path, vocab_size: int, spare: int) -> Path:
    """Make a model whose tokenizer has no special token, and lacks `spare` ids of the model's vocabulary."""
    make_model(folder, "llama", vocab_size=vocab_size)
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    vocab = content["model"]["vocab"]
    vocab.update({f"more {id}": id for id in range(len(vocab), vocab_size - spare)})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


# A mask's words have 32 bits each, so that the first one has none for another token.
@pytest.mark.parametrize(("vocab_size", "spare"), [(512, 0), (520, 0), (512, 100)])
def test_a_tokenizer_without_special_tokens(tmp_path: Path, vocab_size: int, spare: int) -> None:
    engine = make_engine(without_special_tokens(tmp_path, vocab_size, spare), num_blocks=600)
    transcript = run(engine, *(constrained(id, eos_token_ids=[3]) for id in range(4)))
    assert_valid(transcript, {(id, 0) for id in range(4)})


def test_a_tokenizer_of_sentencepiece(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", vocab_size=640)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(LLAMA))
    rule = grammar(GrammarKind.REGEX, "[ a-zé日]{3,9}: [0-9]{2}")
    requests = [constrained(id, grammar=rule, eos_token_ids=[2]) for id in range(8)]
    transcript = run(make_engine(tmp_path), *requests)
    for id in range(8):
        assert transcript.reasons[id, 0] is FinishReason.STOP
        text = load_tokenizer(tmp_path).decode([1, *transcript.tokens[id, 0]])
        # The first space of a text is a dummy prefix to the decoder.
        assert re.fullmatch("[ a-zé日]{2,9}: [0-9]{2}", text), text


def test_a_model_without_a_tokenizer_takes_no_grammar(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    engine = make_engine(tmp_path)
    engine.add(constrained(0))
    result = engine.step()
    while engine.has_work:
        result = engine.step()
    [(_, field, message)] = result.rejections
    assert field == "response_format"
    assert "tokenizer" in message


def test_a_grammar_applies_behind_what_stands_around_it(llama: Path) -> None:
    marker = TOKENIZER.encode("a", add_special_tokens=False)[0]
    around = f"start: thoughts <[{marker}]> @answer\nthoughts: <[^{marker}]>{{0,5}}"
    rule = msgspec.structs.replace(grammar(GrammarKind.JSON_SCHEMA, SCHEMA), around=around)
    requests = [constrained(id, grammar=rule) for id in range(4)]
    whole = run(make_engine(llama, num_blocks=600), *requests)
    lengths = set()
    for tokens in whole.tokens.values():
        at = tokens.index(marker)
        lengths.add(at)
        jsonschema.validate(json.loads(text_of(tokens[at + 1 :])), SCHEMA)
    assert max(lengths) == 5  # a model with random weights uses up what it may
    assert set(whole.reasons.values()) == {FinishReason.STOP}
    # Another engine goes on within the thoughts, and behind them.
    later = [
        msgspec.structs.replace(old, output=whole.tokens[old.id, 0][: 3 + 6 * (old.id % 2)], choice=0)
        for old in requests
    ]
    assert run(make_engine(llama, num_blocks=600), *later).tokens == whole.tokens


_UNION = {"anyOf": [{"$ref": "#/$defs/any"}] * 200}
_UNION_OF_ANCHORS = {"anyOf": [{"$ref": "#any"}] * 200}
_ANY = {"$defs": {"any": {"$anchor": "any"}, "union": _UNION, "property": {"properties": {"a": _UNION}}}}
_PROPERTY = {"$ref": "#/$defs/property"}


def _patterns(count: int) -> dict[str, Any]:
    return {"patternProperties": {f"^(a|b)*{index:05}$": {"type": "string"} for index in range(count)}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        # Without a limit, the first takes 18 seconds and 290 MB, and a number with eight digits all memory of a pod.
        ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
        ({"type": "number", "multipleOf": 1000.003}, "multipleOf"),
        ({"type": "number", "multipleOf": 1e300}, "multipleOf"),
        ({"type": "integer", "allOf": [{"multipleOf": number} for number in (101, 103, 107)]}, "multipleOf"),
        ({"type": "integer", "multipleOf": 1009, "anyOf": [{"multipleOf": 1013}, {}]}, "multipleOf"),
        ({"properties": {f"p{index}": {"multipleOf": 10_007 + index} for index in range(10)}}, "multipleOf"),
        (_patterns(300), "patternProperties"),
        # Each lists 200 alternatives, twice: a mask or the compilation compares 40,000 of them for 6 seconds.
        ({**_UNION, "allOf": [_UNION], **_ANY}, "alternatives"),
        ({**_UNION_OF_ANCHORS, "allOf": [_UNION_OF_ANCHORS], **_ANY}, "alternatives"),
        ({"$ref": "#/$defs/union", "allOf": [{"$ref": "#/$defs/union"}], **_ANY}, "alternatives"),
        ({"properties": {"b": {"allOf": [_PROPERTY, _PROPERTY]}}, **_ANY}, "alternatives"),
        ({"properties": {"a": _UNION}, "patternProperties": {"^a": _UNION}, **_ANY}, "alternatives"),
        ({"prefixItems": [_UNION], "allOf": [{"items": _UNION}], **_ANY}, "alternatives"),
    ],
)
def test_a_schema_that_would_take_all_memory_or_minutes_is_refused(llama: Path, schema: Any, words: str) -> None:
    text = json.dumps(schema)
    function = {"functions": {"f": schema}, "parallel": False}
    hidden = re.sub("[Oo](?=f|P)", lambda found: f"\\u{ord(found[0]):04x}", text)
    twice = re.sub(r'("multipleOf": [^,}]*)', r'\1, "multipleOf": 1', text)
    for rule in (
        grammar(GrammarKind.JSON_SCHEMA, f"\n {text}"),
        grammar(GrammarKind.TOOL_CALLS, function),
        *(grammar(GrammarKind.EBNF, f"start: %json\n {embedded}") for embedded in (text, hidden, twice)),
    ):
        with pytest.raises(GrammarError, match=words):
            Grammars(llama, len(TOKENIZER)).compile(rule).result(timeout=60)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "properties": {
                "price": {"type": "number", "multipleOf": 0.01},
                "rate": {"multipleOf": 0.00025},
                "salary": {"type": "integer", "multipleOf": 1000},
                "dozen": {"$ref": "#/$defs/dozen", "description": "A number of eggs."},
                "maybe": {"anyOf": [{"$ref": "#/$defs/dozen"}, {"type": "null"}], "default": None},
                "multipleOf": {"type": "integer"},
            },
            "$defs": {"dozen": {"type": "integer", "multipleOf": 12}},
        },
        {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]},
        _patterns(20),
        {"type": ["string", "null"], "enum": [f"value {index}" for index in range(3000)]},
        {
            "type": "object",
            "anyOf": [{"$ref": f"#/$defs/kind{index}"} for index in range(300)],
            "$defs": {f"kind{index}": {"properties": {"kind": {"const": index}}} for index in range(300)},
        },
        {
            "allOf": [{"$ref": f"#/$defs/part{index}"} for index in range(30)],
            "$defs": {
                f"part{index}": {"properties": {f"a{index}": {"anyOf": [{"$ref": "#/$defs/part0"}, {"type": "null"}]}}}
                for index in range(30)
            },
        },
    ],
)
def test_usual_multiples_patterns_and_alternatives_are_allowed(llama: Path, schema: Any) -> None:
    for kind, text in ((GrammarKind.JSON_SCHEMA, schema), (GrammarKind.EBNF, f"start: %json {json.dumps(schema)}")):
        assert not Grammars(llama, len(TOKENIZER)).compile(grammar(kind, text)).result(timeout=60).failed
