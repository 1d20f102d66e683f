"""A request whose answer is known."""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from baton_kernels.reference.philox import gumbel_noise
from tests.e2e.prompts import make_prompt
from tests.models import NEAR_TIE, reference_logits

from .answer import Answer, MalformedAnswer
from .fleet import MODEL_NAME

_LENGTHS = (1, 48), (49, 400)  # ranges; the second takes several chunks


class Refused(Exception):
    """The gateway found no pod for the request, and the client is to try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Case:
    """number: of the case. expected: what a fleet answers that nothing disturbs; None = not known yet."""

    number: int
    fields: dict[str, Any]
    expected: Answer | None = None

    @classmethod
    def draw(cls, number: int, rng: random.Random) -> "Case":
        shortest, longest = rng.choice(_LENGTHS)
        fields: dict[str, Any] = {
            "prompt": make_prompt(rng.randint(shortest, longest), rng.randrange(1 << 30)),
            "max_tokens": rng.randint(4, 40),
            "n": rng.choice([1, 1, 2, 3]),
            "ignore_eos": rng.random() < 0.8,
        }
        fields |= rng.choice([{"temperature": 0}, {"temperature": 1.0, "seed": rng.randrange(1 << 30)}])
        fields |= rng.choice([{"logprobs": 2}, {}])
        return cls(number, fields)

    def __str__(self) -> str:
        shown = {**self.fields, "prompt": f"{len(self.fields['prompt'])} tokens"}
        return f"case {self.number}, {shown}"

    async def ask(self, http: httpx.AsyncClient, stream: bool, request_id: str = "") -> Answer:
        """Send the request. Raises Refused, and MalformedAnswer for whatever is no answer.

        request_id: under which the logs will speak of it.
        """
        body = {"model": MODEL_NAME, "return_token_ids": True, **self.fields}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": request_id}) as response:
            if response.status_code != 200:
                _raise_refusal(response, await response.aread())
            if stream:
                return Answer.streamed([line async for line in response.aiter_lines()])
            return Answer.whole(json.loads(await response.aread()))

    async def recorded(self, http: httpx.AsyncClient, folder: Path) -> "Case | None":
        """Return the case with the answer that it has now, which must be that of transformers; None for near ties."""
        expected = await self.ask(http, stream=False)
        for index, choice in enumerate(expected.choices):
            best = self._scores(folder, choice.token_ids, index).topk(2)
            if (best.values[:, 0] - best.values[:, 1]).min() < NEAR_TIE:
                return None
            assert choice.token_ids == best.indices[:, 0].tolist(), str(self)
        return replace(self, expected=expected)

    def _scores(self, folder: Path, token_ids: list[int], choice: int) -> torch.Tensor:
        """Return [tokens, vocab], the highest of which is the token by transformers' logits."""
        prompt = self.fields["prompt"]
        logits = reference_logits(folder, prompt, token_ids)
        if self.fields["temperature"] == 0:
            return logits
        positions = torch.arange(len(prompt), len(prompt) + len(token_ids))
        seeds = torch.full_like(positions, self.fields["seed"])
        return logits + gumbel_noise(seeds, positions, torch.full_like(positions, choice), logits.shape[-1])


def _raise_refusal(response: httpx.Response, content: bytes) -> None:
    retry_after = response.headers.get("retry-after", "")
    if response.status_code == 503 and retry_after.isdigit():
        error = json.loads(content)["error"]
        if error["code"] == "server_is_overloaded":
            raise Refused(error["message"], int(retry_after))
    raise MalformedAnswer(f"status {response.status_code}, {dict(response.headers)}: {content[:500]!r}")
