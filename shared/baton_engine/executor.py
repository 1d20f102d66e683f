"""Who runs the model: the engine launches plans and reads their results."""

from typing import Protocol

import msgspec
import numpy as np
import torch

from .kv_cache import KvCache
from .results import Results
from .step_plan import StepPlan
from .threads import Threads


class Launched(Protocol):
    """A step that is under way."""

    def draw_masked(self, masks: np.ndarray) -> None:
        """Launch the draws that wait for masks: [masked chunks of the plan, words] int32, as
        baton_kernels.reference.masks has them. Called once for a plan with masked chunks, before the next launch."""

    def wait(self) -> Results:
        """Return what the step brings, once all its draws have been launched."""

    def done(self) -> bool:
        """Whether `wait` returns at once."""

    def layers_done(self) -> int:
        """Return of how many layers the KV is complete, as far as that is known before all are."""


class Fence(Protocol):
    """All that was launched before some moment."""

    def wait(self) -> None:
        """Let what is launched from now on into the current stream begin after it."""


class Done(msgspec.Struct):
    """A step that was over when it was launched."""

    results: Results

    def draw_masked(self, masks: np.ndarray) -> None:
        raise RuntimeError("no draw of this step waits for a mask")

    def wait(self) -> Results:
        return self.results

    def done(self) -> bool:
        return True

    def layers_done(self) -> int:
        return 0


class Executor(Protocol):
    """Runs plans in the order in which they are launched.

    depth: steps that may be launched before the oldest is waited for. prefill_rate: prompt tokens a second, measured at
    start; 0 = not measured. threads: those that compute; None on a GPU. dtype: of weights and of what is computed.
    """

    cache: KvCache
    dtype: torch.dtype
    max_model_len: int
    depth: int
    prefill_rate: float
    threads: Threads | None

    def launch(self, plan: StepPlan) -> Launched:
        """Start to compute a step."""

    def fence(self) -> Fence | None:
        """Return what separates the steps launched so far from other streams' work; None where there are no others."""
