"""Users for locust, which send chats, streamed and whole. Each user waits for its answer, so the loop is closed.

    BATON_MODEL=baton-demo locust --locustfile loadtest/online/locustfile.py --host http://127.0.0.1:8000

Arrivals that do not wait, exact lengths and times between tokens: `baton bench serve`. Environment: BATON_MODEL,
BATON_API_KEY, BATON_PROMPT and BATON_OUTPUT_TOKENS. "first token" has the times to the first byte of a stream.
"""

import json
import os
import time

from locust import FastHttpUser, constant, task

MODEL = os.environ.get("BATON_MODEL", "baton-demo")
KEY = os.environ.get("BATON_API_KEY")
PROMPT = os.environ.get("BATON_PROMPT", "What is Baton?")
OUTPUT_TOKENS = int(os.environ.get("BATON_OUTPUT_TOKENS", "32"))
HEADERS = {"authorization": f"Bearer {KEY}"} if KEY else {}


class ChatUser(FastHttpUser):
    wait_time = constant(0)

    @task
    def whole(self) -> None:
        with self.client.post(
            "/v1/chat/completions", json=self._body(), headers=HEADERS, name="whole", catch_response=True
        ) as response:
            if response.status_code == 200 and response.json()["usage"]["completion_tokens"] != OUTPUT_TOKENS:
                response.failure("other usage than asked for")

    @task
    def streamed(self) -> None:
        body = {**self._body(), "stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions", json=body, headers=HEADERS, name="streamed", catch_response=True, stream=True
        ) as response:
            if response.status_code != 200:
                return
            # A read returns only when all requested bytes are there, so a read of one byte gives the arrival time.
            first = next(response.iter_content(1, decode_content=False), b"")
            self._note_first_token(time.perf_counter() - began)
            events = (first + b"".join(response.iter_content(decode_content=False))).decode().split("\n\n")
            if events[-2:] != ["data: [DONE]", ""]:
                response.failure("the stream has no end")
            elif json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] != OUTPUT_TOKENS:
                response.failure("other usage than asked for")

    def _note_first_token(self, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name="first token",
            response_time=seconds * 1e3,
            response_length=0,
            exception=None,
            context={},
        )

    def _body(self) -> dict[str, object]:
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
        }
