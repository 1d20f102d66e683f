"""Chooses the executor of an engine."""

from .config import EngineConfig
from .executor import Executor
from .loading import Progress
from .model_config import ModelConfig
from .ranks.executor import RanksExecutor
from .ranks.stages_executor import StagesExecutor
from .runners import make_local_runner


def make_runner(config: EngineConfig, model: ModelConfig, device: str, progress: Progress | None) -> Executor:
    """Return what runs the model on "cpu" or "cuda" devices: in this process, or in several that divide it."""
    if config.processes == 1:
        return make_local_runner(config, model, device, progress)
    kind = RanksExecutor if config.pipeline_parallel == 1 else StagesExecutor
    return kind(config, model, device, progress)
