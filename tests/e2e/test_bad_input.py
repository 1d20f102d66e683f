"""Whatever is sent, the answer is a 4xx in OpenAI's form or a clean close, and the service goes on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import VOCAB_SIZE, reference_choices

from .prompts import make_prompt
from .stack import Stack

MEBIBYTE = 1 << 20
FIELDS: list[tuple[str, int, dict[str, Any]]] = [
    ("prompt", 400, {"prompt": ""}),
    ("prompt", 400, {"prompt": []}),
    ("prompt", 400, {"prompt": [[]]}),
    ("prompt", 400, {"prompt": [VOCAB_SIZE]}),
    ("prompt", 400, {"prompt": [-1]}),
    ("prompt", 400, {"prompt": [2**40]}),
    ("prompt", 400, {"prompt": [1.5]}),
    ("prompt", 400, {"prompt": {"a": 1}}),
    ("prompt", 400, {"prompt": None}),
    ("prompt", 400, {"prompt": [1] * 2049}),
    ("prompt", 400, {"prompt": [1] * 2000, "max_tokens": 49}),
    ("prompt", 400, {"max_tokens": 2**31}),
    ("max_tokens", 400, {"max_tokens": "5"}),
    ("max_tokens", 400, {"max_tokens": -5}),
    ("n", 400, {"n": 10**9}),
    ("temperature", 400, {"temperature": "hot"}),
    ("logit_bias", 400, {"logit_bias": {str(VOCAB_SIZE): 1}}),
    ("stop_token_ids", 400, {"stop_token_ids": [VOCAB_SIZE]}),
    ("allowed_token_ids", 400, {"allowed_token_ids": [VOCAB_SIZE]}),
    ("stop", 400, {"stop": [""]}),
    ("seed", 400, {"seed": 2**70}),
    ("stream", 400, {"stream": "yes"}),
    ("model", 404, {"model": "nobody"}),
    ("model", 400, {"model": 5}),
]
BODIES: dict[str, tuple[int, bytes]] = {
    "nothing": (400, b""),
    "half an object": (400, b'{"model": "model", "prompt": "a'),
    "an array": (400, b'[{"model": "model"}]'),
    "a number": (400, b"5"),
    "null": (400, b"null"),
    "invalid UTF-8": (400, b'{"model": "model", "prompt": "\xff\xfe"}'),
    "a lone surrogate": (400, b'{"model": "model", "prompt": "\\ud800"}'),
    "NaN": (400, b'{"model": "model", "prompt": "a", "temperature": NaN}'),
    "ten thousand brackets": (400, b"[" * 10_000),
    "ten mebibytes": (413, b'{"model": "model", "prompt": "' + b"a" * (10 * MEBIBYTE) + b'"}'),
}
HALVES = {
    "nothing": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le",
    "a head": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n",
    "half a body": b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"model": "mo',
    "half a chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n{",
}
NONSENSE = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
    "a bad length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "a bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
}


def check_error(body: Any, status: int) -> dict[str, Any]:
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error", status
    return error


async def check_service(stack: Stack, folder: Path) -> None:
    """It answers rightly and holds nothing."""
    prompt = make_prompt(40, seed=600)
    [tokens] = await stack.tokens(prompt, 8)
    assert tokens == reference_choices(folder, prompt, tokens)
    await stack.idle()


@pytest.mark.parametrize(
    ("param", "status", "fields"), FIELDS, ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None
)
async def test_a_wrong_field(stack: Stack, param: str, status: int, fields: dict[str, Any]) -> None:
    response = await stack.http.post("/v1/completions", json={"model": stack.model, "prompt": "a", **fields})
    assert response.status_code == status, response.text
    assert check_error(response.json(), status)["param"].partition("[")[0] == param


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("kind", BODIES)
async def test_a_wrong_body(stack: Stack, kind: str, path: str) -> None:
    status, body = BODIES[kind]
    response = await stack.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    check_error(response.json(), status)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404)])
async def test_a_wrong_path(stack: Stack, method: str, path: str, status: int) -> None:
    response = await stack.http.request(method, path)
    assert response.status_code == status
    check_error(response.json(), status)


async def test_half_a_request_and_gone(stack: Stack, llama: Path) -> None:
    for half in HALVES.values():
        for abortive in (False, True):
            _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
            writer.write(half)
            await writer.drain()
            if abortive:
                writer.transport.abort()
            else:
                writer.close()
                await writer.wait_closed()
    await check_service(stack, llama)


async def test_half_requests_do_not_hold_up_others(stack: Stack, llama: Path) -> None:
    writers = []
    for _ in range(20):
        for half in HALVES.values():
            _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
            writer.write(half)
            writers.append(writer)
    prompt = make_prompt(40, seed=601)
    [tokens] = await stack.tokens(prompt, 8)
    assert tokens == reference_choices(llama, prompt, tokens)
    for writer in writers:
        writer.transport.abort()
    await check_service(stack, llama)


@pytest.mark.parametrize("kind", NONSENSE)
async def test_nonsense_instead_of_a_request(stack: Stack, kind: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(NONSENSE[kind])
    # The connection's end ends the reading: a server that keeps it open would time out here.
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    if answer:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        check_error(json.loads(body), 400)


async def test_the_service_has_not_suffered(stack: Stack, llama: Path) -> None:
    await check_service(stack, llama)
