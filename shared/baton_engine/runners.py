"""Makes the runner of this process for its device."""

from pathlib import Path

from .config import EngineConfig
from .early_stage import EarlyRunner
from .loading import Progress
from .model_config import ModelConfig
from .models.registry import load_model_config
from .runner import Runner
from .shard import ALONE, Ranks
from .stage import WHOLE, Stage


def read_model(config: EngineConfig) -> ModelConfig:
    """Return the config of the model for sequences of the length that the settings allow."""
    model = load_model_config(Path(config.model))
    return model.limited(config.max_model_len or model.default_model_len)


def make_local_runner(
    config: EngineConfig,
    model: ModelConfig,
    device: str,
    progress: Progress | None,
    ranks: Ranks = ALONE,
    stage: Stage = WHOLE,
) -> Runner:
    """Return the runner of this process for a "cpu" or "cuda" device, ready for plans. ranks, stage: as in Runner.

    All modules that need Triton are reached from the runner for a GPU alone. It is imported here, when there is a GPU,
    so that a worker on a CPU needs no Triton.
    """
    kind = Runner if stage.is_last else EarlyRunner
    if device == "cuda":
        from .cuda_runner import CudaRunner
        from .early_cuda_stage import EarlyCudaRunner

        kind = CudaRunner if stage.is_last else EarlyCudaRunner
    runner = kind(config, model, progress, ranks, stage)
    # A rank that cannot load its part has ended by now, which this call reports.
    ranks.least(0)
    runner.start()
    return runner
