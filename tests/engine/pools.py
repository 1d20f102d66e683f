"""Processes that divide models, for the engines of all tests one after another."""

from collections.abc import Callable

from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.executor import Executor
from baton_engine.loading import Progress
from baton_engine.model_config import ModelConfig
from baton_engine.ranks.executor import RanksExecutor
from baton_engine.ranks.processes import RankProcesses
from baton_engine.runners import make_local_runner

MakeEngine = Callable[..., Engine]


class Pools:
    """Processes for 2 and for 4 ranks, which serve the models of all tests one after another."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._pools: dict[int, RankProcesses] = {}
        self._busy: set[int] = set()

    def make_runner(self, config: EngineConfig, model: ModelConfig, device: str, progress: Progress | None) -> Executor:
        count = config.tensor_parallel
        if count == 1:
            return make_local_runner(config, model, device, progress)
        if count not in (2, 4):
            return RanksExecutor(config, model, device, progress)
        if count not in self._pools:
            self._pools[count] = RankProcesses(count, self.problems.append)
        if count in self._busy:
            self._pools[count].stop()
        self._busy.add(count)
        try:
            return RanksExecutor(config, model, device, progress, self._pools[count])
        except BaseException:
            self._pools.pop(count).close()
            self._busy.discard(count)
            raise

    def take(self, count: int) -> RankProcesses:
        """Return the processes of a test that ends them."""
        self._busy.discard(count)
        return self._pools.pop(count)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
