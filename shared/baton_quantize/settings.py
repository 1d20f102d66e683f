"""The settings of a run."""

from pathlib import Path

import msgspec

from baton_engine.config import ConfigError

_LEAST_LENGTH = 16
_MOST = 1 << 20


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What `baton model quantize` takes.

    calibrate, evaluate: files of text. samples: sequences of calibration text. length: tokens of a sequence of either
    text. seed: of the choice of text. group_size: inputs that share a scale in INT4; 0 = the largest that fits. dtype:
    of activations while layers are computed, as --dtype of a worker.
    """

    source: Path
    destination: Path
    format: str
    calibrate: Path | None = None
    evaluate: Path | None = None
    samples: int = 128
    length: int = 2048
    seed: int = 0
    group_size: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= _MOST:
            raise ConfigError(f"--samples {self.samples} must be from 1 to {_MOST}")
        if not _LEAST_LENGTH <= self.length <= _MOST:
            raise ConfigError(f"--length {self.length} must be from {_LEAST_LENGTH} to {_MOST}")
