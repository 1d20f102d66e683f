"""A step that a GPU computes, and the copies of its results to the host."""

from collections.abc import Callable

import msgspec
import numpy as np
import torch

from .device_sampler import Drawn
from .executor import Fence
from .layer_marks import LayerMarks
from .logprobs import logprobs_of
from .results import Choice, Results, mark_broken
from .sampling import TokenLogprobs
from .transfer import to_host


class PromptLogprobs(msgspec.Struct):
    """The logprobs of one chunk's prompt tokens. parts: `logprob_columns` of consecutive tokens, with `count`
    alternatives."""

    chunk: int
    tokens: list[int]
    count: int
    parts: list[torch.Tensor]  # pinned

    def entries(self) -> list[TokenLogprobs]:
        rows = [row for part in self.parts for row in part.tolist()]
        return [logprobs_of(token, row, self.count) for token, row in zip(self.tokens, rows, strict=True)]


class StepInFlight:
    """A Launched step on a GPU. The runner queues the device's work; `send` then queues the copy of the results."""

    def __init__(self, tokens: torch.Tensor, counts: list[int]) -> None:
        """tokens: [draws of the step] int64, on the device, in the order of chunks. counts: the draws of each chunk."""
        self.layers: LayerMarks | None = None
        # Set for a step with prompts: the parameters `starts` and `sums` of `mark_broken`, the latter in pinned memory.
        self.starts: list[int] = []
        self.sums: torch.Tensor | None = None
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.draw_late: Callable[[np.ndarray], Drawn] | None = None  # the draws that wait for masks
        self._tokens, self._counts = tokens, counts
        self._drawn: list[tuple[Drawn, torch.Tensor | None]] = []  # with their logprobs, pinned
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def add(self, drawn: Drawn) -> None:
        """Add the results of draws that the sampler has launched, and queue the copy of their logprobs."""
        self._drawn.append((drawn, None if drawn.logprobs is None else to_host(drawn.logprobs)))

    def send(self) -> "StepInFlight":
        """Queue the copy of the tokens if all draws are launched. Otherwise draw_masked does so later."""
        if self.draw_late is None:
            self._tokens = to_host(self._tokens)
            self._arrived.record()
        return self

    def draw_masked(self, masks: np.ndarray) -> None:
        if self.draw_late is None:
            raise RuntimeError("no draw of this step waits for a mask")
        drawn = self.draw_late(masks)
        self.draw_late = None
        self.add(drawn)
        self.send()

    def layers_ready(self) -> tuple[int, Fence | None]:
        return self.layers.ready() if self.layers else (0, None)

    def behind_layers(self, layers: int) -> Fence | None:
        return self.layers.behind(layers) if self.layers else None

    def done(self) -> bool:
        done: bool = self.draw_late is None and self._arrived.query()  # type: ignore[no-untyped-call]
        return done

    def wait(self) -> Results:
        if self.draw_late is not None:
            raise RuntimeError("draws of this step still wait for masks")
        self._arrived.synchronize()
        tokens = self._tokens.tolist()
        choices = [Choice(token, None) for token in tokens]
        for drawn, logprobs in self._drawn:
            if logprobs is not None:
                special = drawn.choices(tokens, logprobs.tolist())
                for index, choice in zip(drawn.indices, special, strict=True):
                    choices[index] = choice
        rest = iter(choices)
        results = Results([[next(rest) for _ in range(count)] for count in self._counts])
        if self.prompt_logprobs:
            results.prompt_logprobs = {part.chunk: part.entries() for part in self.prompt_logprobs}
        if self.sums is not None:
            mark_broken(results.choices, self.starts, self.sums.tolist())
        return results
