"""The plan of requests and send times. It is complete before the first request and the same for every target."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from baton_bench.arrivals import step_arrivals
from baton_bench.prompts import PromptMaker
from baton_bench.settings import BenchSettings, Lengths
from baton_bench.trace import BLOCK_TOKENS, TraceRow, read_trace


@dataclass(frozen=True, slots=True)
class Turn:
    """What is new in a request, after the conversation so far, and how long its answer is.

    cancel_after: tokens after which the client leaves; 0 = never.
    """

    tokens: list[int]
    outputs: int
    cancel_after: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    """A request, or a conversation whose later turns follow their answers. due: seconds from the start."""

    due: float
    turns: list[Turn]


@dataclass
class Plan:
    """One load. seconds: of arrivals. dropped, clipped: requests that were too long for the model."""

    name: str
    seconds: float
    sessions: list[Session] = field(default_factory=list)
    dropped: int = 0
    clipped: int = 0

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def rate(self) -> float:
        """The offered requests a second."""
        return self.requests / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Room:
    """The limits of the model. max_model_len: tokens of prompt and answer, None = not known."""

    max_model_len: int | None
    highest_token: int


def make_plans(settings: BenchSettings, room: Room) -> list[Plan]:
    """Return the loads in the order in which they are to be run. Raises BenchError."""
    if settings.trace is not None:
        rows = read_trace(settings.trace)
        return [_TracePlan(settings, room, i, rows, speed).plan for i, speed in enumerate(settings.speeds)]
    if settings.steps:
        seconds = min(sum(step[1] for step in settings.steps), settings.seconds)
        return [_RatePlan(settings, room, 0, settings.steps, f"steps {settings.steps_text}", seconds).plan]
    return [
        _RatePlan(settings, room, i, [(rate, settings.seconds)], f"{rate:g}/s", settings.seconds).plan
        for i, rate in enumerate(settings.rates)
    ]


class _Builder:
    """Puts sessions into a plan as long as they fit."""

    def __init__(self, settings: BenchSettings, room: Room, number: int, name: str, seconds: float) -> None:
        self.plan = Plan(name, seconds)
        self._settings = settings
        self._room = room
        # Arrivals and lengths are those of the load; content differs between loads, as it would be cached otherwise.
        self.rng = random.Random(f"{settings.seed}/{name}")
        self.prompts = PromptMaker(f"{settings.seed}/{number}", room.highest_token)

    def add(self, due: float, turns: Iterable[tuple[list[int], int]]) -> None:
        """turns: new tokens and length of the answer of each."""
        fitting = list(self._fitting(list(turns)))
        if fitting:
            self.plan.sessions.append(Session(due, fitting))

    def _fitting(self, turns: list[tuple[list[int], int]]) -> Iterator[Turn]:
        before = 0
        for position, (tokens, outputs) in enumerate(turns):
            cancel = self.rng.random() < self._settings.cancel_share and outputs > 1
            midway = self.rng.randint(1, max(outputs - 1, 1))
            fitted = self._fit(before, len(tokens), outputs)
            if fitted is None:
                self.plan.dropped += len(turns) - position
                return
            if fitted != (len(tokens), outputs):
                self.plan.clipped += 1
                tokens, outputs = tokens[: fitted[0]], fitted[1]
            yield Turn(tokens, outputs, min(midway, outputs) if cancel else 0)
            before += len(tokens) + outputs

    def _fit(self, before: int, inputs: int, outputs: int) -> tuple[int, int] | None:
        """Return new input and output length; None to drop the request."""
        most = self._room.max_model_len
        if most is None or before + inputs + outputs <= most:
            return inputs, outputs
        # Prompts are shortened first, and answers only if that is not enough.
        outputs = min(outputs, most - before - 1)
        return None if self._settings.too_long == "drop" or outputs < 1 else (most - before - outputs, outputs)


class _RatePlan(_Builder):
    def __init__(
        self,
        settings: BenchSettings,
        room: Room,
        number: int,
        steps: list[tuple[float, float]],
        name: str,
        seconds: float,
    ) -> None:
        super().__init__(settings, room, number, name, seconds)
        dues = takewhile(lambda due: due < seconds, step_arrivals(steps, settings.burstiness, self.rng))
        shared = self.prompts.random("shared", settings.shared_prefix_tokens)
        arrivals = list(islice(dues, settings.requests))
        if len(arrivals) == settings.requests:
            self.plan.seconds = arrivals[-1]
        for session, due in enumerate(arrivals):
            self.add(due, [self._turn(session, turn, shared) for turn in range(settings.turns)])

    def _turn(self, session: int, turn: int, shared: list[int]) -> tuple[list[int], int]:
        settings = self._settings
        inputs, outputs = _draw(settings.input_tokens, self.rng), _draw(settings.output_tokens, self.rng)
        new = self.prompts.random(f"{session}/{turn}", inputs)
        return (shared + new if turn == 0 else new), outputs


class _TracePlan(_Builder):
    def __init__(self, settings: BenchSettings, room: Room, number: int, rows: list[TraceRow], speed: float) -> None:
        assert settings.trace is not None
        within = list(islice((row for row in rows if row.at / speed < settings.seconds), settings.requests))
        seconds = within[-1].at / speed
        super().__init__(settings, room, number, f"{settings.trace.stem} ×{speed:g}", seconds)
        for index, row in enumerate(within):
            self.add(row.at / speed, [(self._prompt(index, row), _scaled(row.outputs, settings.length_scale))])

    def _prompt(self, index: int, row: TraceRow) -> list[int]:
        scale = self._settings.length_scale
        if row.blocks is None:
            return self.prompts.random(index, _scaled(row.inputs, scale))
        # Blocks shrink as a whole, so that shared prefixes stay shared.
        size = _scaled(BLOCK_TOKENS, scale)
        return self.prompts.of_blocks(row.blocks, size, _scaled(row.inputs, size / BLOCK_TOKENS))


def _draw(lengths: Lengths, rng: random.Random) -> int:
    return rng.randint(*lengths)


def _scaled(length: int, scale: float) -> int:
    return max(round(length * scale), 1)
