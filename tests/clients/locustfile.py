"""What locust's users do: ask the demo model, streamed and whole."""

import json
import os

from locust import FastHttpUser, constant, task

MODEL = os.environ["BATON_TEST_MODEL"]
HEADERS = {"authorization": f"Bearer {os.environ['BATON_TEST_KEY']}"}
OUTPUT_TOKENS = 8


class User(FastHttpUser):
    wait_time = constant(0)

    @task
    def whole(self) -> None:
        with self.client.post(
            "/v1/chat/completions", json=self._body(), headers=HEADERS, name="whole", catch_response=True
        ) as response:
            if response.json()["usage"]["completion_tokens"] != OUTPUT_TOKENS:
                response.failure("other usage than asked for")

    @task
    def streamed(self) -> None:
        body = {**self._body(), "stream": True, "stream_options": {"include_usage": True}}
        with self.client.post(
            "/v1/chat/completions", json=body, headers=HEADERS, name="streamed", catch_response=True, stream=True
        ) as response:
            events = "".join(response.iter_content()).split("\n\n")
            if events[-2:] != ["data: [DONE]", ""]:
                response.failure("the stream has no end")
            elif json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] != OUTPUT_TOKENS:
                response.failure("other usage than asked for")

    @task
    def wrong(self) -> None:
        body = {**self._body(), "model": "nobody"}
        with self.client.post(
            "/v1/chat/completions", json=body, headers=HEADERS, name="wrong", catch_response=True
        ) as response:
            if response.status_code == 404 and response.json()["error"]["code"] == "model_not_found":
                response.success()

    def _body(self) -> dict[str, object]:
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is Baton?"}],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
        }
