"""No body makes the gateway fail or holds its event loop, and what is refused names the field, in the one form."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from baton_gateway.web.app import BODIES
from baton_proto import serving_pb2 as pb

from ..fake_worker import Job
from ..harness import pods, running
from ..loop_watch import not_held
from .asking import Answer, ask
from .bodies import encoded, nearly_valid, raw, wrong_types
from .fields import FIELDS, VALID, least_body

BODIES_IN_ALL = int(os.environ.get("FUZZ_BODIES", "5000"))
SEED = os.environ.get("FUZZ_SEED")
JSON_TYPE = (b"content-type", b"application/json")

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.soak,
    pytest.mark.timeout(max(900, BODIES_IN_ALL // 10)),
]


def fuzz(percent: int) -> Callable[[Any], Any]:
    """Let a test have this part of all bodies."""
    decide = settings(
        max_examples=BODIES_IN_ALL * percent // 100,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    return decide if SEED is None else lambda test: seed(int(SEED))(decide(test))


async def answer_at_once(job: Job) -> None:
    """Give every choice two tokens and its end in one step, with all that the request asks for."""
    sampling = job.submit.sampling
    tokens = [5, 6][: sampling.max_tokens]
    prompt = job.pod.prompt_info(job) if sampling.HasField("prompt_logprobs") else pb.PromptInfo()
    await job.send(
        *(
            job.delta(
                tokens, choice=choice, finish=pb.FINISH_REASON_LENGTH, **({"prompt": prompt} if choice == 0 else {})
            )
            for choice in range(sampling.n)
        )
    )


async def asked(app: ASGIApp, *request: Any) -> Answer:
    """Send a request, which must not hold the event loop."""
    return await not_held(lambda: ask(app, *request))


# Writes all that a request can bring into a prompt.
TEMPLATE = """{{ bos_token }}{{ tools | tojson if tools }}{% for message in messages -%}
<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls or [] %}
{{- call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|end|>
{%- endfor %}{{ a | tojson if a is defined }}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def app(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ASGIApp]:
    template = tmp_path_factory.mktemp("fuzz") / "template.jinja"
    template.write_text(TEMPLATE)
    async with pods(max_model_len=4096) as decodes, running(model_folder, decodes, chat_template=template) as stack:
        stack.pod.script = answer_at_once
        yield stack.server.config.app


@pytest.mark.parametrize("path", sorted(VALID))
async def test_the_valid_bodies_are_valid(app: ASGIApp, path: str) -> None:
    for body in [least_body(path), *VALID[path]]:
        answer = await ask(app, "POST", path, encoded(body), [JSON_TYPE])
        answer.check()
        assert answer.status == 200, answer.body


async def test_every_field_is_fuzzed() -> None:
    assert [set(fields) for fields in FIELDS.values()] == [set(body.model_fields) for body in BODIES]


@fuzz(39)
@given(request=raw(), content_type=st.sampled_from([b"application/json", b"text/plain", b"multipart/form-data", b""]))
async def test_what_is_no_request(app: ASGIApp, request: tuple[str, bytes], content_type: bytes) -> None:
    path, body = request
    headers = [(b"content-type", content_type)] if content_type else []
    answer = await asked(app, "POST", path, body, headers)
    answer.check()


@fuzz(24)
@given(request=wrong_types())
async def test_a_field_of_the_wrong_type_is_named(app: ASGIApp, request: tuple[str, bytes, set[str]]) -> None:
    path, body, wrong = request
    answer = await asked(app, "POST", path, body, [JSON_TYPE])
    assert answer.status == 400, answer.body
    param = answer.error()["param"]
    assert param is not None, answer.body
    assert param.partition("[")[0].partition(".")[0] in wrong, answer.body


@fuzz(24)
@given(request=nearly_valid())
async def test_one_thing_changed(app: ASGIApp, request: tuple[str, bytes]) -> None:
    path, body = request
    answer = await asked(app, "POST", path, body, [JSON_TYPE])
    answer.check()
    assert answer.status in (200, 400, 404), answer.body
    if answer.status == 400:
        assert answer.error()["param"] is not None, answer.body


_SEGMENTS = st.binary(max_size=12).map(quote_from_bytes) | st.sampled_from(
    ["v1", "models", "chat", "completions", "tokenize", "tiny", "..", "", "%00", "%2f", "%0a", "%ff", "openapi.json"]
)
_HEADERS = st.tuples(
    st.sampled_from(
        [
            *(b"authorization", b"content-type", b"content-length", b"content-encoding", b"x-request-id", b"expect"),
            *(b"accept", b"host", b"cookie", b"origin", b"range", b"traceparent", b"x-forwarded-for", b"x-session-id"),
        ]
    ),
    st.binary(max_size=20) | st.sampled_from([b"Bearer ", b"Bearer x y", b"gzip", b"-1", b"1e3", b"9" * 5000, b"\xb2"]),
)


@fuzz(12)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "BREW", "post"]),
    target=st.sampled_from(["/v1/models", *FIELDS])
    | st.builds("/v1/models/{}".format, _SEGMENTS)
    | st.builds("/{}".format, st.lists(_SEGMENTS, max_size=4).map("/".join))
    | st.builds("/v1/models?{}".format, _SEGMENTS),
    headers=st.lists(_HEADERS, max_size=3),
)
async def test_odd_paths_methods_and_headers(
    app: ASGIApp, method: str, target: str, headers: list[tuple[bytes, bytes]]
) -> None:
    body = encoded(VALID[target][0]) if target in VALID else b""
    answer = await asked(app, method, target, body, headers)
    answer.check()
