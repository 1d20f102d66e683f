"""A locust user that requests a model that does not exist."""

import os

from locust import FastHttpUser, constant, task


class MistakenUser(FastHttpUser):
    wait_time = constant(0)

    @task
    def wrong(self) -> None:
        with self.client.post(
            "/v1/chat/completions",
            json={"model": "nobody", "messages": [{"role": "user", "content": "What is Baton?"}]},
            headers={"authorization": f"Bearer {os.environ['BATON_API_KEY']}"},
            name="wrong",
            catch_response=True,
        ) as response:
            if response.status_code == 404 and response.json()["error"]["code"] == "model_not_found":
                response.success()
