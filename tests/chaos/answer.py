"""The answer to a completions request, streamed or whole."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Batches of other sizes round otherwise: by some 1e-5 here.
_LOGPROB_TOLERANCE = 1e-4


class MalformedAnswer(Exception):
    """An answer that breaks the rules of the API, or an error in it."""


@dataclass
class ChoiceAnswer:
    """One choice. logprobs, logprob_tokens and offsets are empty when they were not asked for."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprob_tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """Take a whole choice or a chunk of one."""
        if self.finish_reason is not None:
            raise MalformedAnswer(f"a choice goes on after its end: {choice}")
        self.token_ids += choice.get("token_ids") or []
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"]
        logprobs = choice["logprobs"] or {"tokens": [], "text_offset": [], "token_logprobs": []}
        self.logprob_tokens += logprobs["tokens"]
        self.offsets += logprobs["text_offset"]
        self.logprobs += logprobs["token_logprobs"]

    def same_as(self, other: "ChoiceAnswer") -> bool:
        """Whether all is equal, log probabilities but for their rounding."""
        exact = [
            (each.token_ids, each.text, each.finish_reason, each.logprob_tokens, each.offsets, len(each.logprobs))
            for each in (self, other)
        ]
        return exact[0] == exact[1] and all(
            math.isclose(ours, theirs, abs_tol=_LOGPROB_TOLERANCE)
            for ours, theirs in zip(self.logprobs, other.logprobs, strict=True)
        )


@dataclass
class Answer:
    """All choices. usage: prompt, completion and total tokens."""

    choices: list[ChoiceAnswer]
    usage: tuple[int, int, int]

    @classmethod
    def whole(cls, body: dict[str, Any]) -> "Answer":
        """Read the body of an answer that was not streamed. Raises MalformedAnswer."""
        return cls._of([body], body.get("usage"))

    @classmethod
    def streamed(cls, lines: Iterable[str]) -> "Answer":
        """Read the lines of a stream that has ended. Raises MalformedAnswer."""
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        if not data or data[-1] != "[DONE]":
            raise MalformedAnswer(f"the stream breaks off: {data[-2:]}")
        events = [json.loads(event) for event in data[:-1]]
        usages = [event["usage"] for event in events if event.get("usage")]
        if len(usages) != 1 or not events[-1].get("usage"):
            raise MalformedAnswer(f"the usage is not told once, at the end: {usages}")
        return cls._of(events, usages[0])

    def same_as(self, other: "Answer") -> bool:
        return (
            self.usage == other.usage
            and len(self.choices) == len(other.choices)
            and all(ours.same_as(theirs) for ours, theirs in zip(self.choices, other.choices, strict=True))
        )

    @classmethod
    def _of(cls, events: list[dict[str, Any]], usage: dict[str, Any] | None) -> "Answer":
        choices: dict[int, ChoiceAnswer] = {}
        for event in events:
            if "error" in event:
                raise MalformedAnswer(f"an error in the answer: {event}")
            for choice in event["choices"]:
                choices.setdefault(choice["index"], ChoiceAnswer()).add(choice)
        if usage is None or sorted(choices) != list(range(len(choices))):
            raise MalformedAnswer(f"usage {usage}, choices {sorted(choices)}")
        for choice in choices.values():
            if choice.finish_reason is None:
                raise MalformedAnswer(f"a choice without an end: {choice}")
        counts = tuple(usage[f"{kind}_tokens"] for kind in ("prompt", "completion", "total"))
        return cls([choices[index] for index in sorted(choices)], counts)
