"""Processes that divide models, for the engines of all tests one after another."""

from collections.abc import Callable

from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.executor import Executor
from baton_engine.loading import Progress
from baton_engine.model_config import ModelConfig
from baton_engine.ranks.executor import RanksExecutor
from baton_engine.ranks.processes import RankProcesses
from baton_engine.ranks.stages_executor import StagesExecutor
from baton_engine.runners import make_local_runner

MakeEngine = Callable[..., Engine]

# Ranks and stages. Engines that are divided in another way start processes of their own.
_SHAPES = ((2, 1), (4, 1), (1, 2), (2, 2))


class Pools:
    """The processes by ranks and stages."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._pools: dict[tuple[int, int], RankProcesses] = {}
        self._busy: set[tuple[int, int]] = set()

    def make_runner(self, config: EngineConfig, model: ModelConfig, device: str, progress: Progress | None) -> Executor:
        shape = config.tensor_parallel, config.pipeline_parallel
        kind = RanksExecutor if config.pipeline_parallel == 1 else StagesExecutor
        if shape == (1, 1):
            return make_local_runner(config, model, device, progress)
        if shape not in _SHAPES:
            return kind(config, model, device, progress)
        if shape not in self._pools:
            self._pools[shape] = RankProcesses(*shape, self.problems.append)
        if shape in self._busy:
            self._pools[shape].stop()
        self._busy.add(shape)
        try:
            return kind(config, model, device, progress, self._pools[shape])
        except BaseException:
            self._pools.pop(shape).close()
            self._busy.discard(shape)
            raise

    def take(self, *shape: int) -> RankProcesses:
        """Return the processes of a test that ends them."""
        ranks, stages = shape
        self._busy.discard((ranks, stages))
        return self._pools.pop((ranks, stages))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
