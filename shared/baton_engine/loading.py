"""Weights from safetensors files: taken one tensor at a time, checked by name and shape, and read ahead."""

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import TracebackType

import torch

from baton_tokenizer.errors import NoTokenizerError, TokenizerError
from baton_tokenizer.load import load_tokenizer

from .checkpoint import Checkpoint
from .config import ConfigError
from .read_ahead import Range, ReadAhead

log = logging.getLogger(__name__)

# Called with the name of the current work, the number of its parts that are done, and the number of all parts.
Progress = Callable[[str, int, int], None]

# Returns the bytes that a tensor will take in memory, by the dtype in which it is stored and its shape.
TensorBytes = Callable[[torch.dtype, tuple[int, ...]], float]

# What safetensors calls each dtype.
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
# Tensors of these dtypes hold values. Those of other dtypes hold codes, which scales or tables turn into values.
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Weights:
    """The tensors of a model folder. Use as a context manager; `take` reads each tensor once.

    progress: called after each tensor with the number of tensors read and the number of all tensors. checkpoint: the
    tensors to offer; None = all of the folder. whole: all tensors should be taken, and a warning names those that are
    not.
    """

    whole = True

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._progress = progress
        self._checkpoint = checkpoint or Checkpoint.read(folder)
        self.names = self._checkpoint.names
        self._untaken = set(self.names)
        self._files = ReadAhead.for_device(device)

    def __enter__(self) -> "Weights":
        self._files.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)
        if self.whole and error is None and self._untaken:
            names = sorted(self._untaken)
            log.warning("the model does not use %d tensors of %s: %s", len(names), self._folder, ", ".join(names[:5]))

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def range(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype) -> Range:
        """Return where the rows of a tensor, or of a part of it, are. Raises ConfigError as `take` does."""
        stored = self._checkpoint.find(name)
        if stored.shape != shape:
            raise ConfigError(
                f"{name} in {stored.path.name} is {list(stored.shape)}; config.json calls for {list(shape)}"
            )
        has = self.stored_dtype(name)
        if has != dtype and not (has in PLAIN and dtype in PLAIN):
            raise ConfigError(
                f"{name} in {stored.path.name} is {dtype_name(has)}, not {dtype_name(dtype)}; quantization_config in "
                "config.json must say how each quantized weight is stored"
            )
        if not part:
            return Range(stored.path, stored.begin, stored.size)
        first, end, _ = part[0].indices(shape[0])
        row_bytes = stored.size // shape[0]
        return Range(stored.path, stored.begin + first * row_bytes, (end - first) * row_bytes)

    def expect(self, ranges: Iterable[Range]) -> None:
        """Read these ranges ahead. They are those of the tensors that will be taken, in the same order."""
        self._files.expect(ranges)

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor, or the part of it that slices of its axes select, in the given dtype on this device.

        shape: that of the whole tensor. Only the rows of the part are read. Floating-point dtypes of at least 16 bits
        are cast to each other. Raises ConfigError when the tensor is missing, has another shape or dtype, or cannot be
        read.
        """
        wanted = self.range(name, shape, part, dtype)
        try:
            stored = self._files.take(wanted).view(self.stored_dtype(name))
        except OSError as error:
            raise ConfigError(f"{name} cannot be read from {wanted.path}: {error}") from None
        self._untaken.discard(name)
        if self._progress is not None:
            self._progress("weights", len(self.names) - len(self._untaken), len(self.names))
        tensor = stored.view(-1, *shape[1:]) if shape else stored.view(())
        if part:
            tensor = tensor[(slice(None), *part[1:])]
        return tensor.to(dtype).contiguous()

    def leave(self, prefix: str, numbers: Collection[int]) -> None:
        """Note that this process will not take the tensors whose names have one of these numbers after the prefix."""
        begin, left = len(prefix), {str(number) for number in numbers}
        self._untaken = {
            name for name in self._untaken if not name.startswith(prefix) or name[begin:].partition(".")[0] not in left
        }

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in its file. Raises ConfigError when the tensor is missing, or of a dtype that
        no weight has."""
        stored = self._checkpoint.find(name)
        if stored.dtype not in _DTYPES:
            raise ConfigError(f"{name} in {stored.path.name} is {stored.dtype}, which is not served")
        return _DTYPES[stored.dtype]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in its file. Raises ConfigError when the tensor is missing."""
        return self._checkpoint.find(name).shape


def weights_bytes(
    folder: Path, size: TensorBytes, without: frozenset[str] = frozenset(), checkpoint: Checkpoint | None = None
) -> int:
    """Return the bytes that a model folder's tensors take, from the files' headers. without: names that do not
    count. checkpoint: the tensors; None = those of the folder."""
    tensors = (checkpoint or Checkpoint.read(folder)).tensors.items()
    counted = [stored for name, stored in tensors if name not in without]
    return round(sum(size(_DTYPES.get(stored.dtype, torch.uint8), stored.shape) for stored in counted))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
