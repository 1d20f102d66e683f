"""Weights from safetensors files: memory-mapped, taken one tensor at a time, checked by name and shape."""

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .config import ConfigError

log = logging.getLogger(__name__)

# Called with the name of the present work, the number of its parts that are done, and the number of all its parts.
Progress = Callable[[str, int, int], None]

# Returns the bytes that a tensor will take in memory, by the dtype in which it is stored and its shape.
TensorBytes = Callable[[torch.dtype, tuple[int, ...]], float]

# What safetensors calls each dtype.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
# Tensors of these dtypes are numbers by themselves. Others are codes, which scales or tables turn into numbers.
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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

        shape: that of the whole tensor. Only the part is read. Floating-point dtypes of at least 16 bits are cast to
        each other. Raises ConfigError when the tensor is missing, or has another shape or dtype.
        """
        stored = self._find(name)
        path = self._file_of[name]
        if tuple(stored.get_shape()) != shape:
            raise ConfigError(f"{name} in {path.name} is {stored.get_shape()}; config.json calls for {list(shape)}")
        has = self.stored_dtype(name)
        if has != dtype and not (has in PLAIN and dtype in PLAIN):
            raise ConfigError(
                f"{name} in {path.name} is {dtype_name(has)}, not {dtype_name(dtype)}; quantization_config in "
                "config.json must say how each quantized weight is stored"
            )
        tensor: torch.Tensor = stored[part or tuple(slice(0, size) for size in shape)]
        self._untaken.discard(name)
        if self._progress is not None:
            self._progress("weights", len(self._file_of) - len(self._untaken), len(self._file_of))
        return torch.empty_like(tensor, dtype=dtype, device=self.device).copy_(tensor)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in its file. Raises ConfigError when the tensor is missing, or of a dtype that
        no weight has."""
        dtype: str = self._find(name).get_dtype()
        if dtype not in _DTYPES:
            raise ConfigError(f"{name} in {self._file_of[name].name} is {dtype}, which is not served")
        return _DTYPES[dtype]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in its file. Raises ConfigError when the tensor is missing."""
        return tuple(self._find(name).get_shape())

    def _find(self, name: str) -> Any:
        path = self._file_of.get(name)
        if path is None:
            raise ConfigError(f"{self._folder} has no tensor {name!r}; the architecture in config.json needs it")
        try:
            return self._file(path).get_slice(name)
        except SafetensorError:
            raise ConfigError(f"{path} has no tensor {name!r}, which the index says it holds") from None

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise ConfigError(f"the shard {path} is missing; the index names it") from None
            except SafetensorError as error:
                raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None
        return self._open[path]


def weights_bytes(folder: Path, size: TensorBytes, without: frozenset[str] = frozenset()) -> int:
    """Return the bytes that a model folder's tensors take, from the files' headers. without: names that do not
    count."""
    files: dict[Path, list[str]] = {}
    for name, path in _index(folder).items():
        if name not in without:
            files.setdefault(path, []).append(name)
    total = 0.0
    for path, names in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                for tensor in map(file.get_slice, names):
                    total += size(_DTYPES.get(tensor.get_dtype(), torch.uint8), tuple(tensor.get_shape()))
        except SafetensorError:
            # `take` will raise the error that describes the problem with the file.
            continue
    return round(total)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    try:
        content = json.loads(path.read_text())
        ids = list(content["model"]["vocab"].values()) if isinstance(content["model"]["vocab"], dict) else []
        ids += [len(content["model"]["vocab"]) - 1] if not ids else []
        ids += [token["id"] for token in content.get("added_tokens", [])]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a tokenizer: {error!r}") from None
    if max(ids) >= vocab_size:
        raise ConfigError(f"{path} has token ids up to {max(ids)}, but the weights have a vocabulary of {vocab_size}")
