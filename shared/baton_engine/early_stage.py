"""The runner of a stage that other stages follow: it passes hidden states on, and draws nothing."""

import numpy as np
import torch

from .attention.backend import AttentionBatch
from .executor import LaunchedHere, WithoutLayers
from .results import Results
from .runner import Runner
from .step_plan import StepPlan


class EarlyRunner(Runner):
    """Computes all stages of a pipeline but the last one, on a CPU."""

    def learn(self, drawn: list[tuple[int, int]]) -> None:
        """Take rows and the tokens that the last stage has drawn for them. The next plan may compute these tokens."""
        self._table.extend(drawn)

    def _finish(self, plan: StepPlan, batch: AttentionBatch, hidden: torch.Tensor) -> LaunchedHere:
        self._stage.send(hidden)
        return PassedOn()


class PassedOn(WithoutLayers):
    """A step of which a stage has computed its part. The results are those of the last stage."""

    def draw_masked(self, masks: np.ndarray) -> None:
        """Do nothing: the last stage draws."""

    def wait(self) -> Results:
        return Results([])

    def done(self) -> bool:
        return True
