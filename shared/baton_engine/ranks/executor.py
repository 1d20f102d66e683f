"""Runs plans on several ranks. The first one is this process, which also schedules."""

import time

import numpy as np
import torch

from baton_engine.config import ConfigError, EngineConfig
from baton_engine.executor import Fence, Launched, RanksFence, StepMark
from baton_engine.kv_dtype import choose_kv_dtype
from baton_engine.loading import Progress
from baton_engine.model_config import ModelConfig
from baton_engine.pairs.ends import PairEnds
from baton_engine.pairs.rank_end import RankEnd
from baton_engine.results import Results
from baton_engine.runners import make_local_runner
from baton_engine.shard import RankNumber, own_experts
from baton_engine.step_plan import StepPlan

from .cache import RanksCache
from .device import rank_config
from .kv_part import SeatKv
from .messages import DrawMasked, Launch
from .processes import RankDied, RankProcesses
from .seat import Seat

# A hanging GPU is detected after this time, with two steps in flight. Hanging processes are detected earlier.
LONGEST_STEP_S = 20.0


class RanksExecutor:
    """Implements Executor. Every rank gets every plan, and draws all tokens itself: noise is a function of seed and
    position, and the logits are the same on all ranks. The results are those of rank 0."""

    stages = 1

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        device: str,
        progress: Progress | None,
        processes: RankProcesses | None = None,
    ) -> None:
        """Start the ranks, or use the given ones, and load the model.

        Raises ConfigError, which names the rank, when the model or the settings cannot be served.
        """
        # Raise what can be known before any process is started.
        choose_kv_dtype(config.kv_cache_dtype, model, getattr(torch, model.dtype))
        model.part(RankNumber(0, config.tensor_parallel))
        SeatKv(model.kv_layout(model.dtype), Seat.of(config, 0))
        if config.expert_parallel:
            own_experts(model.num_experts, RankNumber(0, config.tensor_parallel))
        own = rank_config(config, 0)
        self._processes = processes or RankProcesses(config.tensor_parallel, config.pipeline_parallel)
        try:
            self._start(config, own, model, device, progress)
        except BaseException:
            self._processes.close()
            raise

    def _start(
        self, config: EngineConfig, own: EngineConfig, model: ModelConfig, device: str, progress: Progress | None
    ) -> None:
        """own: the settings of this process."""
        processes = self._processes
        with processes.explained(ConfigError):
            group = processes.begin(config, torch.device(own.device))
            runner = make_local_runner(own, model, device, progress, group, group.stage)
        processes.await_loaded()
        self._runner = runner
        self.dtype, self.quantization, self.max_model_len = runner.dtype, runner.quantization, runner.max_model_len
        self.depth, self.times, self.threads = runner.depth, runner.times, runner.threads
        layout = model.kv_layout(runner.cache.layout.planes[0].dtype)
        self._launches = 0
        self.cache = RanksCache(layout, runner.cache, processes)
        self.cache.warm_up()

    @property
    def compilations(self) -> int:
        """As in Executor, in this process: all ranks of a stage compile the same kernels at the same steps."""
        return self._runner.compilations

    def begin_service(self) -> None:
        """As in Executor."""
        self._runner.begin_service()

    def launch(self, plan: StepPlan) -> Launched:
        self._processes.check()
        self._processes.send(Launch(plan))
        self._launches += 1
        with self._processes.explained(RankDied):
            return _Launched(self._runner.launch(plan), self._processes, self._launches)

    def fence(self) -> Fence | None:
        """As in Executor. Pieces that come over the host need no fence: their KV is written in the stream of the
        steps."""
        return RanksFence(StepMark(self._launches), self._runner.fence())

    def pair_ends(self) -> PairEnds:
        """Return the ends of pairs with other pods' GPUs. To be called once."""
        own = RankEnd(self._runner.cache, self.cache.layout, 0, self._processes.seats[0].ranks)
        return PairEnds(own, self.cache.layout, self._processes)

    def close(self) -> None:
        """As in Executor."""
        self._runner.close()
        self._processes.close()


class _Launched:
    """A step that has been launched on all ranks. number: how many had been launched with this one."""

    def __init__(self, launched: Launched, processes: RankProcesses, number: int) -> None:
        self._launched, self._processes, self._number = launched, processes, number
        self._ends_by = time.monotonic() + LONGEST_STEP_S

    def draw_masked(self, masks: np.ndarray) -> None:
        self._processes.send(DrawMasked(masks))
        with self._processes.explained(RankDied):
            self._launched.draw_masked(masks)

    def wait(self) -> Results:
        return self._launched.wait()

    def done(self) -> bool:
        done = self._launched.done()
        if not done and time.monotonic() > self._ends_by:
            raise RankDied(f"a step has not ended for {LONGEST_STEP_S:g} s: GPUs of the ranks wait for each other")
        return done

    def layers_ready(self) -> tuple[int, Fence | None]:
        layers, own = self._launched.layers_ready()
        return layers, RanksFence(StepMark(self._number, layers), own)
