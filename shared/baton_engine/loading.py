"""Weights from safetensors files: memory-mapped, taken one tensor at a time, checked by name and shape."""

import json
import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from baton_tokenizer.errors import NoTokenizerError, TokenizerError
from baton_tokenizer.load import load_tokenizer

from .config import ConfigError

log = logging.getLogger(__name__)

# Called with the name of the present work, the number of its parts that are done, and the number of all its parts.
Progress = Callable[[str, int, int], None]


class Weights:
    """The tensors of a model folder. Use as a context manager; `take` reads each tensor once.

    progress: called after each tensor with the number of tensors read and the number of all tensors.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._progress = progress
        self._file_of = _index(folder)
        self._untaken = set(self._file_of)
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._open.clear()
        if error is None and self._untaken:
            names = sorted(self._untaken)
            log.warning("the model does not use %d tensors of %s: %s", len(names), self._folder, ", ".join(names[:5]))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor, or the part of it that slices of its axes select, in the given dtype on this device.

        shape: that of the whole tensor. Only the part is read. Raises ConfigError when the tensor is missing or has
        another shape.
        """
        path = self._file_of.get(name)
        if path is None:
            raise ConfigError(f"{self._folder} has no tensor {name!r}; the architecture in config.json needs it")
        try:
            stored = self._file(path).get_slice(name)
        except SafetensorError:
            raise ConfigError(f"{path} has no tensor {name!r}, which the index says it holds") from None
        if tuple(stored.get_shape()) != shape:
            raise ConfigError(f"{name} in {path.name} is {stored.get_shape()}; config.json calls for {list(shape)}")
        tensor: torch.Tensor = stored[part or tuple(slice(0, size) for size in shape)]
        self._untaken.discard(name)
        if self._progress is not None:
            self._progress("weights", len(self._file_of) - len(self._untaken), len(self._file_of))
        return torch.empty_like(tensor, dtype=dtype, device=self.device).copy_(tensor)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise ConfigError(f"the shard {path} is missing; the index names it") from None
            except SafetensorError as error:
                raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None
        return self._open[path]


def weights_bytes(folder: Path, dtype: torch.dtype, without: frozenset[str] = frozenset()) -> int:
    """Return the bytes that a model folder's tensors take in a dtype, from the files' headers. without: names that do
    not count."""
    files: dict[Path, list[str]] = {}
    for name, path in _index(folder).items():
        if name not in without:
            files.setdefault(path, []).append(name)
    total = 0
    for path, names in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        except SafetensorError:
            # `take` will raise the error that describes the problem with the file.
            continue
    return total * dtype.itemsize


def _index(folder: Path) -> dict[str, Path]:
    """Return which file holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from None
        missing = sorted({name for name in files.values() if not (folder / name).exists()})
        if missing:
            raise ConfigError(f"{folder} lacks the shards {', '.join(missing)} that its index names")
        return {tensor: folder / name for tensor, name in files.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        hint = "; weights in pickle files are not read" if list(folder.glob("*.bin")) else ""
        raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json{hint}")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise ConfigError(f"{single} is not a whole safetensors file: {error}") from None


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise ConfigError when the folder's tokenizer can produce ids that the weights have no embedding for."""
    try:
        ids = load_tokenizer(folder).get_vocab(with_added_tokens=True).values()
    except NoTokenizerError:
        return
    except TokenizerError as error:
        raise ConfigError(f"the tokenizer of {folder} cannot be used: {error}") from None
    if max(ids, default=0) >= vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has token ids up to {max(ids)}, but the weights have a vocabulary of "
            f"{vocab_size}"
        )
