"""A step of which everything but the draws has been computed."""

from collections.abc import Callable

import numpy as np
import torch

from .executor import WithoutLayers
from .results import Results


class StepWithoutDraws(WithoutLayers):
    """A step whose draws wait for masks."""

    def __init__(self, draw: Callable[[np.ndarray], Results]) -> None:
        self._draw = draw
        self._results: Results | None = None

    @torch.inference_mode()
    def draw_masked(self, masks: np.ndarray) -> None:
        self._results = self._draw(masks)

    def done(self) -> bool:
        return self._results is not None

    def wait(self) -> Results:
        if self._results is None:
            raise RuntimeError("draws of this step still wait for masks")
        return self._results
