"""The folder into which a model is quantized, shard by shard, so that an interrupted run can be resumed."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file

from baton_engine.checkpoint import INDEX, Checkpoint, Stored, read_header
from baton_engine.config import ConfigError

from .codes import Tensors

_STATE = ".quantize.json"


class _State(msgspec.Struct):
    """job: what the shards depend on. shards: the SHA-256 of each finished shard."""

    job: dict[str, Any]
    shards: dict[str, str] = {}


class Destination:
    """A shard gets its final name when all of its bytes are on the disk, and config.json is written last. So what has a
    config.json is a whole model, and a run that was killed leaves only whole shards."""

    def __init__(self, folder: Path, job: dict[str, Any], shards: int) -> None:
        """job: the settings and the source, as JSON. Raises ConfigError if the folder holds something else."""
        self.folder = folder
        self._count = shards
        state = self._read_state()
        if state is None:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError(f"{folder} exists and is no unfinished run of this command; name a new folder")
            state = _State(job)
        differing = sorted(name for name in {*job, *state.job} if job.get(name) != state.job.get(name))
        if differing:
            raise ConfigError(
                f"{folder} holds an unfinished run with another {', '.join(differing)}; remove it, or repeat the "
                "command with the same settings"
            )
        self._state = state
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.part"):
            leftover.unlink()
        self._verify()
        self._write_state()

    @property
    def finished(self) -> int:
        """How many shards were there at the start, or have been written since."""
        return len(self._state.shards)

    def has(self, shard: int) -> bool:
        return self._name(shard) in self._state.shards

    def write(self, shard: int, tensors: Tensors) -> None:
        """Write the tensors of a shard. shard: counted from 0."""
        name = self._name(shard)
        contiguous = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
        with self._replacing(name) as part:
            save_file(contiguous, part, {"format": "pt"})
            digest = _digest(part)
        self._state.shards[name] = digest
        self._write_state()

    def checkpoint(self, shard: int) -> Checkpoint:
        """Return the tensors of one shard."""
        tensors = self._header(shard)
        return Checkpoint(self.folder, tensors, {name: stored.path for name, stored in tensors.items()})

    def tensors(self) -> dict[str, Stored]:
        """Return the tensors of all shards."""
        return {name: stored for shard in range(self._count) for name, stored in self._header(shard).items()}

    def put(self, name: str, data: bytes) -> None:
        """Write a file beside the shards."""
        with self._replacing(name) as part:
            part.write_bytes(data)

    def finish(self, config: dict[str, Any]) -> None:
        """Write the index and config.json, which make the folder a model."""
        tensors = self.tensors()
        index = {
            "metadata": {"total_size": sum(stored.size for stored in tensors.values())},
            "weight_map": {name: stored.path.name for name, stored in sorted(tensors.items())},
        }
        self.put(INDEX, _json(index))
        self.put("config.json", _json(config))
        (self.folder / _STATE).unlink()

    def _header(self, shard: int) -> dict[str, Stored]:
        return read_header(self.folder / self._name(shard))

    def _name(self, shard: int) -> str:
        return f"model-{shard + 1:05}-of-{self._count:05}.safetensors"

    def _verify(self) -> None:
        """Forget shards that are missing or damaged."""
        for name, digest in list(self._state.shards.items()):
            path = self.folder / name
            if not path.is_file() or _digest(path) != digest:
                del self._state.shards[name]

    def _read_state(self) -> _State | None:
        path = self.folder / _STATE
        try:
            return msgspec.json.decode(path.read_bytes(), type=_State)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be used: {error}; remove the folder and start again") from None

    def _write_state(self) -> None:
        self.put(_STATE, _json(self._state))

    @contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        """Write a file under another name first, and give it its own when its bytes are on the disk."""
        part = self.folder / f".{name}.{os.getpid()}.part"
        try:
            yield part
            _sync(part)
            part.replace(self.folder / name)
            _sync(self.folder)
        finally:
            part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"
