"""The device of each rank."""

import msgspec
import torch

from baton_engine.config import ConfigError, EngineConfig
from baton_engine.device import find_device

# Bytes of a GPU's memory that NCCL takes for connections to the other ranks, and the same again for other stages.
_NCCL_BYTES = 512 << 20


def rank_config(config: EngineConfig, number: int) -> EngineConfig:
    """Return the settings of a process, which name its device, and make the device the current one of this thread.

    GPUs are taken in their order, from the configured one on. Raises ConfigError if there are too few.
    """
    device = find_device(config.device)
    if device.type == "cuda":
        first, found = device.index or 0, torch.cuda.device_count()
        if first + config.processes > found:
            asked = f"--tensor-parallel {config.tensor_parallel}"
            if config.pipeline_parallel > 1:
                asked += f" with --pipeline-parallel {config.pipeline_parallel}"
            raise ConfigError(f"{asked} needs {config.processes} GPUs, but this process sees {found - first}")
        device = torch.device("cuda", first + number)
        torch.cuda.set_device(device)
    connections = (config.tensor_parallel > 1) + (config.pipeline_parallel > 1)
    aside = config.set_aside_bytes + (connections * _NCCL_BYTES if device.type == "cuda" else 0)
    return msgspec.structs.replace(config, device=str(device), set_aside_bytes=aside)
