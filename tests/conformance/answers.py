"""Checks that every answer fits OpenAI's specification, and that all errors have the same form."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs

JSON = "application/json"
EVENTS = "text/event-stream"
RESPONSES = "/responses"
LAST_EVENTS = ("response.completed", "response.incomplete")


class Answers:
    """Compares answers with the schemas of a specification."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._validators: dict[tuple[str, str, str], jsonschema_rs.Validator] = {}

    def problems(
        self, path: str, method: str, body: Any, status: int, content_type: str, content: bytes
    ) -> Iterator[str]:
        """Tell what is wrong with an answer. body: of the request, as JSON has it."""
        if status >= 500:
            yield f"status {status}"
        kind = content_type.partition(";")[0]
        streamed = status == 200 and isinstance(body, dict) and body.get("stream") is True
        if kind != (EVENTS if streamed else JSON):
            yield f"status {status} with content type {content_type!r}"
            return
        try:
            read = _named_events if path == RESPONSES else _events
            documents = list(read(content)) if streamed else [json.loads(content)]
        except ValueError as error:
            yield f"status {status} whose content is not {kind}: {error}"
            return
        for document in documents:
            if status == 200:
                yield from self._mismatches(path, method, kind, document)
            else:
                yield from _error_problems(status, document)

    def _mismatches(self, path: str, method: str, kind: str, document: Any) -> Iterator[str]:
        key = (path, method, kind)
        if key not in self._validators:
            contents = self._spec["paths"][path][method]["responses"]["200"]["content"]
            # Chunks of a text completion have the form of the whole, says the specification.
            schema = contents.get(kind, contents[JSON])["schema"]
            self._validators[key] = jsonschema_rs.Draft202012Validator(
                {**schema, "components": self._spec["components"]}
            )
        for error in self._validators[key].iter_errors(document):
            where = "/".join("*" if isinstance(part, int) else str(part) for part in error.instance_path)
            yield f"status 200, {kind}: {where or 'the whole'}: {error.message[:200]}"


def mended(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the specification with null where OpenAI's server sends it and the schemas do not say so."""
    spec = _with_nulls(spec)
    answer = spec["components"]["schemas"]["CreateCompletionResponse"]["properties"]
    choice = answer["choices"]["items"]["properties"]
    # Chunks of a stream before the last.
    choice["finish_reason"] = _or_null(choice["finish_reason"])
    answer["usage"] = _or_null(answer["usage"])
    # Nothing predicts the first token of an echoed prompt.
    logprobs = choice["logprobs"]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        logprobs[name]["items"] = _or_null(logprobs[name]["items"])
    return spec


def _with_nulls(value: Any) -> Any:
    """Say `nullable`, which is of OpenAPI 3.0 and has no meaning in 3.1, in the words of 3.1."""
    if isinstance(value, list):
        return [_with_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _with_nulls(item) for key, item in value.items()}
    return _or_null(schema) if schema.get("nullable") is True else schema


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _events(content: bytes) -> Iterator[Any]:
    *events, end, rest = content.decode().split("\n\n")
    if (end, rest) != ("data: [DONE]", ""):
        raise ValueError(f"the stream ends by {end[-100:]!r}")
    for event in events:
        if not event.startswith(":"):
            yield json.loads(event.removeprefix("data: "))


def _named_events(content: bytes) -> Iterator[Any]:
    """Read the stream of a response, whose end is an event of its own and whose events are numbered."""
    *events, rest = content.decode().split("\n\n")
    kind = ""
    for number, event in enumerate(event for event in events if not event.startswith(":")):
        name, _, data = event.partition("\n")
        document = json.loads(data.removeprefix("data: "))
        kind = document["type"]
        if (name, document["sequence_number"]) != (f"event: {kind}", number):
            raise ValueError(f"event {number} is {name!r} with {data[:200]!r}")
        yield document
    if rest or kind not in LAST_EVENTS:
        raise ValueError(f"the stream ends by {kind!r} and {rest[-100:]!r}")


def _error_problems(status: int, document: Any) -> Iterator[str]:
    error = document.get("error") if isinstance(document, dict) and len(document) == 1 else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        yield f"status {status} without the four keys of an error: {document!r:.200}"
    elif not (isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)):
        yield f"status {status} without message or type: {document!r:.200}"
    elif not all(error[name] is None or isinstance(error[name], str) for name in ("param", "code")):
        yield f"status {status} whose param or code is no string: {document!r:.200}"
