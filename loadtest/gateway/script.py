"""The script of simulated engines: an answer begins after a given time and then gains a token at each step."""

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton_tokenizer.load import load_tokenizer

# Words only, so that every token is whole characters and every server can write it as soon as it has it.
_TEXT = (
    "Baton serves large language models on separate pods and hands the cache from one to the other while the prompt "
    "is still being computed so that the first token does not wait for it and no answer is ever built on a piece of "
    "it that failed a check"
)


@dataclass(frozen=True)
class Script:
    """first_s: from a request to its first token. step_s: between the steps, each of which gives all a token. opening:
    the tokens with which an answer begins; the others follow over and over."""

    first_s: float
    step_s: float
    token_ids: list[int]
    texts: list[str]
    opening: list[int]

    @classmethod
    def of(cls, model: Path, first_s: float, step_s: float, opening: str = "") -> "Script":
        tokenizer = load_tokenizer(model)
        token_ids, begin = (tokenizer.encode(text, add_special_tokens=False).ids for text in (_TEXT, opening))
        return cls(first_s, step_s, token_ids, [tokenizer.decode([token_id]) for token_id in token_ids], begin)

    def token_id(self, position: int) -> int:
        after = position - len(self.opening)
        return self.opening[position] if after < 0 else self.token_ids[after % len(self.token_ids)]


def script_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripted servers share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-s", type=float, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    return parser


async def keep_stepping(step_s: float, step: Callable[[], None]) -> None:
    """Call `step` at a steady pace, without end; a late call does not delay the next one."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + step_s, loop.time())
        await asyncio.sleep(due - loop.time())
        step()
