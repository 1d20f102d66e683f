"""No request, however large or odd, holds the event loop, and every one is answered."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp

from ..harness import pods, running
from ..loop_watch import not_held
from .asking import ask
from .hostile import HOSTILE, MOST_BYTES
from .test_fuzz import BODIES_IN_ALL, JSON_TYPE, TEMPLATE, answer_at_once, fuzz

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.soak,
    pytest.mark.timeout(max(900, BODIES_IN_ALL // 10)),
]

CONTEXT = 2**20  # tokens; enough that no long prompt is refused for its length


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def app(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ASGIApp]:
    template = tmp_path_factory.mktemp("hostile") / "template.jinja"
    template.write_text(TEMPLATE)
    async with pods(max_model_len=CONTEXT) as decodes, running(model_folder, decodes, chat_template=template) as stack:
        stack.pod.script = answer_at_once
        yield stack.server.config.app


async def check(app: ASGIApp, name: str, size: int) -> None:
    hostile = HOSTILE[name]
    body = hostile.body(size)
    answer = await not_held(lambda: ask(app, "POST", hostile.path, body, [JSON_TYPE]))
    answer.check()
    assert answer.status in (200, 400, 413), answer.body[:200]
    if answer.status == 400:
        message = answer.error()["message"]
        assert answer.error()["param"] is not None or message.startswith(
            ("The body is not valid JSON", "The body has more")
        )


@pytest.mark.parametrize("name", HOSTILE)
async def test_as_much_as_a_body_holds(app: ASGIApp, name: str) -> None:
    await check(app, name, MOST_BYTES)


@fuzz(1)
@given(name=st.sampled_from(sorted(HOSTILE)), size=st.integers(10_000, MOST_BYTES))
async def test_any_size(app: ASGIApp, name: str, size: int) -> None:
    await check(app, name, size)
