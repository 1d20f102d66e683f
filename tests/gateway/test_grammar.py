"""Grammars for answers, from the fields of a request to the message to the pod."""

import json
from typing import Any

import pytest

from baton_proto import serving_pb2 as pb

from .fake_worker import failing, say
from .harness import Stack, error_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}, "required": ["b", "a"]}
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
KINDS = pb.Grammar


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            KINDS.KIND_JSON_SCHEMA, TEXT, "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}}, KINDS.KIND_JSON_OBJECT, "", "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, KINDS.KIND_JSON_SCHEMA, TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT}}, KINDS.KIND_JSON_SCHEMA, TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, KINDS.KIND_REGEX, "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, KINDS.KIND_CHOICE, '["a", "é"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: A"}}, KINDS.KIND_EBNF, "start: A", "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, KINDS.KIND_JSON_OBJECT, "", "structured_outputs.json_object"),
        ({"guided_json": SCHEMA}, KINDS.KIND_JSON_SCHEMA, TEXT, "guided_json"),
        ({"guided_choice": ["a"], "ignore_eos": True}, KINDS.KIND_CHOICE, '["a"]', "guided_choice"),
    ],
)  # fmt: skip
async def test_the_pod_is_told(stack: Stack, fields: dict[str, Any], kind: pb.Grammar.Kind, text: str, param: str):
    assert (await stack.chat(**fields)).status_code == 200
    assert (await stack.complete(**fields)).status_code == 200
    for job in stack.pod.jobs:
        assert job.submit.sampling.grammar == pb.Grammar(kind=kind, text=text, param=param)
        assert job.submit.sampling.eos_token_ids


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
async def test_without_any_the_pod_is_told_nothing(stack: Stack, fields: dict[str, Any]):
    assert (await stack.chat(**fields)).status_code == 200
    assert not stack.pod.jobs[0].submit.sampling.HasField("grammar")


async def test_the_answer_is_ordinary_content(stack: Stack):
    said = '{"b": 1, "a": "é"}'
    stack.pod.script = say(stack.ids(said))
    completion = await stack.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
    )
    assert completion.choices[0].message.content == said
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_pod_refuses_names_the_field(stack: Stack, stream: bool):
    message = "The grammar cannot be used: Unimplemented keys"
    stack.pod.script = failing(pb.Failure.CODE_INVALID, message, "response_format.json_schema.schema")
    named = {"type": "json_schema", "json_schema": NAMED}
    response = await stack.chat(response_format=named, stream=stream)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["message"], error["param"]) == (message, "response_format.json_schema.schema")
