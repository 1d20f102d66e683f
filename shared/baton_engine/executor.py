"""The interface to the runner of the model: the engine launches plans on it and reads their results."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout

from .kv_scales import KvScales
from .results import Results
from .step_plan import StepPlan
from .step_times import StepTimes
from .threads import Threads


class Launched(Protocol):
    """A step that has been launched."""

    def draw_masked(self, masks: np.ndarray) -> None:
        """Launch the draws that wait for masks, [masked chunks of the plan, words] int32, packed as in
        baton_kernels.reference.masks. Called once for a plan with masked chunks, before the next launch."""

    def wait(self) -> Results:
        """Wait for the step and return its results. All its draws must have been launched."""

    def done(self) -> bool:
        """Whether `wait` returns at once."""

    def layers_ready(self) -> tuple[int, "Fence | None"]:
        """Return a number of layers and a fence behind their KV. Without a fence, their KV is complete already."""


class LaunchedHere(Launched, Protocol):
    """A step that a runner of this process has launched."""

    def behind_layers(self, layers: int) -> "Fence | None":
        """Return the fence behind the KV of so many layers, a number that `layers_ready` has returned on any rank."""


class Fence(Protocol):
    """Marks the end of all work that was launched before the fence was made."""

    def wait(self) -> None:
        """Make work that is launched into the current stream from now on begin after the fence."""


class StepMark(msgspec.Struct):
    """A place in the work of every rank of a pod: behind the first `launched` steps, or if `layers` is not 0, behind
    the KV of so many layers of the last of these steps."""

    launched: int
    layers: int = 0


class RanksFence(msgspec.Struct):
    """Implements Fence on several ranks, each of which has its own fence at the mark. own: that of rank 0."""

    mark: StepMark
    own: Fence | None

    def wait(self) -> None:
        if self.own is not None:
            self.own.wait()


class WithoutLayers:
    """A part of LaunchedHere: the KV of all layers is complete when the step is over, and nothing is known before."""

    def layers_ready(self) -> tuple[int, Fence | None]:
        return 0, None

    def behind_layers(self, layers: int) -> Fence | None:
        return None


class Done(WithoutLayers, msgspec.Struct):
    """A step whose results were complete when `launch` returned."""

    results: Results

    def draw_masked(self, masks: np.ndarray) -> None:
        raise RuntimeError("no draw of this step waits for a mask")

    def wait(self) -> Results:
        return self.results

    def done(self) -> bool:
        return True


class KvStore(Protocol):
    """The KV of all blocks. device: the device of pieces that are gathered or scattered.

    scales: those of codes; None = the planes are not quantized. The methods are those of KvCache.
    """

    device: torch.device
    num_blocks: int
    layout: KvLayout
    scales: KvScales | None

    @property
    def facts(self) -> dict[str, str]: ...

    @property
    def format(self) -> str: ...

    def warm_up(self) -> None: ...

    def gather(
        self, tables: Sequence[list[int]], extent: Extent, out: torch.Tensor, check: bool = False
    ) -> torch.Tensor: ...

    def scatter(self, tables: Sequence[list[int]], extent: Extent, values: torch.Tensor) -> None: ...

    def checksum(self, values: torch.Tensor) -> torch.Tensor: ...


class Executor(Protocol):
    """Runs plans in the order in which they are launched.

    depth: the number of steps that may be in flight when another one is launched. stages: the number of pipeline
    stages; with several, a step must not depend on draws of steps in flight. times: the predictor of step times, fitted
    at start. threads: the threads that compute; None on a GPU. dtype: of activations and unquantized weights.
    quantization: the name of the weights' Quantization.
    """

    @property
    def cache(self) -> KvStore: ...

    dtype: torch.dtype
    quantization: str
    max_model_len: int
    depth: int
    stages: int
    times: StepTimes
    threads: Threads | None

    @property
    def compilations(self) -> int:
        """The kernels compiled since `begin_service`, each of which halted the engine."""

    def begin_service(self) -> None:
        """Start counting compilations, because requests arrive from now on."""

    def launch(self, plan: StepPlan) -> Launched:
        """Start the computation of a step."""

    def fence(self) -> Fence | None:
        """Return a fence behind the steps launched so far, for work in other streams; None on a CPU."""

    def close(self) -> None:
        """End the processes that belong to this executor, if there are any. Nothing can be launched afterwards."""
