"""The runner for a GPU of a stage that other stages follow."""

import torch

from baton_kernels.decode_inputs import DecodeInputs

from .attention.backend import AttentionBatch, GraphBackend
from .cuda_runner import CudaRunner
from .decode_graphs import DecodeGraphs
from .early_stage import PassedOn
from .executor import LaunchedHere
from .layer_marks import LayerMarks
from .results import Results
from .shard import ALONE
from .step_plan import StepPlan


class EarlyCudaRunner(CudaRunner):
    """As EarlyRunner. The host knows all tokens of a plan, and launches it before the previous one has ended."""

    def learn(self, drawn: list[tuple[int, int]]) -> None:
        """As EarlyRunner.learn."""
        self._table.extend(drawn)

    def _make_decode_graphs(self, backend: GraphBackend) -> DecodeGraphs:
        return _HiddenGraphs(
            self._model, self.cache, backend, self._table, self._block_size, 0, self.device, ALONE, self._graph_input,
            self.model.recent_tokens,
        )  # fmt: skip

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan) -> LaunchedHere:
        self._receive(len(plan.rows))
        return self._pass_on(graphs.replay(plan).result)

    def _draw_all(
        self, plan: StepPlan, batch: AttentionBatch, hidden: torch.Tensor, ids: torch.Tensor, marks: LayerMarks | None
    ) -> LaunchedHere:
        return self._pass_on(hidden[: plan.num_tokens])

    def _pass_on(self, hidden: torch.Tensor) -> LaunchedHere:
        # The next graph writes to the same memory, perhaps before the next stage has received this.
        self._stage.send(hidden.clone())
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end.record()
        return _PassedOn(end)


class _HiddenGraphs(DecodeGraphs):
    """Graphs whose results are the hidden states of this stage. They are the same for all ways to draw."""

    def _finish(self, inputs: DecodeInputs, hidden: torch.Tensor, gathers: bool) -> torch.Tensor:
        return hidden


class _PassedOn(PassedOn):
    def __init__(self, end: torch.cuda.Event) -> None:
        self._end = end

    def wait(self) -> Results:
        self._end.synchronize()
        return super().wait()
