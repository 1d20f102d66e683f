"""A server under test, and the form of requests that it accepts."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton_bench.answer import Answer, AnswerReader
from baton_bench.dialect import Conversation, Dialect, Form
from baton_bench.endpoint import Endpoint, Exchange
from baton_bench.errors import BenchError
from baton_bench.prompts import LOWEST_TOKEN
from baton_bench.settings import BenchSettings

_HIGHEST_TOKENS = (30_000, 2_000, 500, 250)
_PROBE_TOKENS = 4
_PROBE_S = 120.0
_FORMS: tuple[Form, ...] = ("ids", "text", "chat")


@dataclass(frozen=True)
class Target:
    """highest_token, max_model_len: the server's limits, None if unknown. by_token: chunks report their tokens."""

    name: str
    url: str
    endpoint: Endpoint
    dialect: Dialect
    highest_token: int | None
    max_model_len: int | None
    by_token: bool

    def request(self, conversation: Conversation, answer: Answer) -> bytes:
        """Return the next turn's request."""
        headers = {"x-session-id": f"bench-{answer.session}"} if answer.session else {}
        return self.endpoint.post(self.dialect.path, self.dialect.body(conversation, answer.asked), headers)

    async def send(
        self,
        request: bytes,
        conversation: Conversation,
        answer: Answer,
        began: float,
        timeout_s: float,
        cancel_after: int = 0,
    ) -> AnswerReader:
        """Send a request now, fill in its answer and add that to the conversation.

        began: what times count from, on the clock of time.perf_counter. cancel_after: tokens, 0 = never.
        """
        reader = AnswerReader(answer, began, self.by_token)

        def on_body(body: bytes, now: float) -> None:
            reader.feed(body, now)
            if (cancel_after and answer.tokens >= cancel_after) or answer.error:
                exchange.leave()

        exchange = Exchange(request, on_body)
        answer.sent = time.perf_counter() - began
        try:
            async with asyncio.timeout(timeout_s):
                await exchange.run(self.endpoint)
        except TimeoutError:
            answer.fail("timeout", f"after {timeout_s:g} s")
        except OSError as error:
            answer.fail("no connection", str(error))
        answer.end = time.perf_counter() - began
        if answer.outcome == "pending":
            self._judge(exchange, reader, answer, cancel_after)
        conversation.hear("".join(reader.said), reader.token_ids, answer.tokens)
        return reader

    def _judge(self, exchange: Exchange, reader: AnswerReader, answer: Answer, cancel_after: int) -> None:
        if exchange.status not in (0, 200):
            answer.fail(f"status {exchange.status}", _message(exchange.refusal))
        elif cancel_after and answer.tokens >= cancel_after:
            answer.outcome = "cancelled"
        elif exchange.failure:
            answer.fail("broken connection", exchange.failure)
        elif not reader.done or not answer.events:
            answer.fail("no answer", "the stream has no end" if answer.events else "there are no tokens")
        elif self.dialect.exact and answer.tokens != answer.asked:
            answer.fail("wrong length", f"{answer.tokens} of {answer.asked} tokens")
        else:
            answer.outcome = "completed"


async def find_target(name: str, url: str, settings: BenchSettings) -> Target:
    """Find out which requests a server accepts. Raises BenchError when it answers none."""
    endpoint = Endpoint.parse(url, settings.api_key.get_secret_value())
    model, max_model_len = settings.model, settings.max_model_len
    if not model or max_model_len is None:
        listed = await _models(name, endpoint, required=not model)
        model = model or next(iter(listed), "")
        max_model_len = max_model_len or listed.get(model)
    if not model:
        raise BenchError(f"{name}: {url} lists no model: give --model")
    refusals = []
    for dialect, highest in _candidates(model, settings):
        target = Target(name, url, endpoint, dialect, highest, max_model_len, by_token=False)
        conversation = Conversation(dialect.form)
        conversation.say([LOWEST_TOKEN, highest or 0])
        answer = Answer(0.0, conversation.tokens, _PROBE_TOKENS)
        reader = await target.send(
            target.request(conversation, answer), conversation, answer, time.perf_counter(), _PROBE_S
        )
        if answer.error in ("no connection", "timeout", "status 401", "status 403", "status 429"):
            raise BenchError(f"{name}: {url}: {answer.error}: {answer.detail}")
        if answer.outcome == "completed" and (reader.token_ids or not dialect.token_ids):
            return replace(target, by_token=reader.by_token)
        refusals.append(f"{dialect.form}: {answer.error or 'no token ids'}: {answer.detail}")
    raise BenchError(f"{name}: {url} answers nothing that was tried:\n  " + "\n  ".join(refusals))


def _candidates(model: str, settings: BenchSettings) -> Iterator[tuple[Dialect, int | None]]:
    forms = _FORMS if settings.prompt_as == "auto" else (settings.prompt_as,)
    highests = (settings.highest_token,) if settings.highest_token else _HIGHEST_TOKENS
    for form in forms:
        for exact in (True, False):
            dialect = Dialect(model, form, exact, form == "ids" and settings.turns > 1, settings.temperature)
            for highest in highests if form == "ids" else (None,):
                yield dialect, highest


async def _models(name: str, endpoint: Endpoint, required: bool) -> dict[str, int | None]:
    """Return the models that the server lists, with the lengths that they take where it says so."""
    try:
        listed = await endpoint.get("/v1/models")
        return {model["id"]: model.get("max_model_len") for model in listed["data"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if required:
            raise BenchError(f"{name}: cannot list the models of {endpoint.host}:{endpoint.port}: {error}") from None
        return {}


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
