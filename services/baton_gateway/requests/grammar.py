"""Translates the request fields that constrain the format of an answer into the grammar that pods take."""

import json
from dataclasses import dataclass
from typing import Any

from baton_proto import serving_pb2 as pb

from ..errors import bad_request
from ..settings import GatewaySettings
from .bodies import ChatCompletionRequest, GenerationRequest, Tool


@dataclass(frozen=True, slots=True)
class FormatFields:
    """The client's names of the fields that set the format of an answer."""

    format: str
    schema: str


CHAT_FORMAT = FormatFields("response_format", "response_format.json_schema.schema")


def grammar_of(
    request: GenerationRequest, settings: GatewaySettings, fields: FormatFields = CHAT_FORMAT
) -> pb.Grammar | None:
    """Return the grammar that the output must follow, if any. Raises ApiError naming a field that cannot be served."""
    # An answer that must be a function call has no content, so the other fields do not apply to it.
    given = _tool_calls(request) or [
        *_response_format(request, fields),
        *_structured_outputs(request),
        *_guided(request),
    ]
    if len(given) > 1:
        one, other = given[0].param, given[1].param
        raise bad_request(f"'{one}' and '{other}' exclude each other.", other)
    for grammar in given:
        if len(grammar.text) > settings.max_grammar_chars:
            most = settings.max_grammar_chars
            raise bad_request(f"'{grammar.param}' has more than {most} characters.", grammar.param)
        if grammar.kind in (pb.Grammar.KIND_JSON_SCHEMA, pb.Grammar.KIND_TOOL_CALLS):
            _check_schema(grammar, settings.max_schema_depth)
        return grammar
    return None


def json_grammar(schema: Any, param: str) -> pb.Grammar:
    """Return the grammar of JSON that matches a schema. schema: parsed, or as JSON text."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return pb.Grammar(kind=pb.Grammar.KIND_JSON_SCHEMA, text=text, param=param)


def _response_format(request: GenerationRequest, fields: FormatFields) -> list[pb.Grammar]:
    given = request.response_format
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [pb.Grammar(kind=pb.Grammar.KIND_JSON_OBJECT, param=fields.format)]
    if given.type == "structural_tag":
        raise bad_request("'response_format' of type structural_tag is not supported.", "response_format")
    if given.json_schema is None:
        raise bad_request("'response_format' of type json_schema needs 'json_schema'.", "response_format.json_schema")
    return [json_grammar(given.json_schema.schema_, fields.schema)]


def _structured_outputs(request: GenerationRequest) -> list[pb.Grammar]:
    given = request.structured_outputs
    if given is None:
        return []
    if given.structural_tag is not None:
        raise bad_request("'structured_outputs.structural_tag' is not supported.", "structured_outputs.structural_tag")
    grammars = _grammars(given.json_, given.regex, given.choice, given.grammar, "structured_outputs.")
    if given.json_object:
        grammars.append(pb.Grammar(kind=pb.Grammar.KIND_JSON_OBJECT, param="structured_outputs.json_object"))
    if len(grammars) != 1:
        raise bad_request(
            "'structured_outputs' needs exactly one of json, regex, choice, grammar and json_object.",
            "structured_outputs",
        )
    return grammars


def _tool_calls(request: GenerationRequest) -> list[pb.Grammar]:
    if not isinstance(request, ChatCompletionRequest) or not request.must_call:
        return []
    schemas = {tool.function.name: parameters_of(tool) for tool in request.tools or ()}
    if request.called is not None:
        return [json_grammar(schemas[request.called], "tools")]
    parallel = request.parallel_tool_calls is not False
    text = json.dumps({"functions": schemas, "parallel": parallel}, ensure_ascii=False)
    return [pb.Grammar(kind=pb.Grammar.KIND_TOOL_CALLS, text=text, param="tools")]


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments, with type object unless the schema names another type."""
    return {"type": "object", **(tool.function.parameters or {})}


def _guided(request: GenerationRequest) -> list[pb.Grammar]:
    return _grammars(
        request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar, "guided_"
    )


def _grammars(
    schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None, prefix: str
) -> list[pb.Grammar]:
    kinds = pb.Grammar
    grammars = [] if schema is None else [json_grammar(schema, f"{prefix}json")]
    if choice is not None:
        text = json.dumps(choice, ensure_ascii=False)
        grammars.append(pb.Grammar(kind=kinds.KIND_CHOICE, text=text, param=f"{prefix}choice"))
    for name, kind, source in (("regex", kinds.KIND_REGEX, regex), ("grammar", kinds.KIND_EBNF, grammar)):
        if source is not None:
            grammars.append(pb.Grammar(kind=kind, text=source, param=f"{prefix}{name}"))
    return grammars


def _check_schema(grammar: pb.Grammar, max_depth: int) -> None:
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError):
        raise bad_request(f"'{grammar.param}' is not JSON.", grammar.param) from None
    if not isinstance(schema, dict | bool):
        raise bad_request(f"'{grammar.param}' must be a JSON schema.", grammar.param)
    level: list[Any] = [schema]
    for _ in range(max_depth):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise bad_request(f"'{grammar.param}' is nested more than {max_depth} levels deep.", grammar.param)
