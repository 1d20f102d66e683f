"""The tensors of a checkpoint, as the headers of its safetensors files describe them. No tensor is read."""

import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from .config import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Bits of an element of each dtype of the format.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the format's own library
_MOST_AXES = 64  # of a tensor; the limit of torch


class Stored(NamedTuple):
    """A tensor in a file. dtype: as the format calls it. begin: where its bytes begin in the file. size: in bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Checkpoint:
    """The tensors of a model folder. tensors: those that exist, by name. names: those that should exist."""

    def __init__(self, folder: Path, tensors: dict[str, Stored], promised: dict[str, Path]) -> None:
        """promised: the file that should hold each tensor."""
        self.folder = folder
        self.names = frozenset(promised)
        self.tensors = tensors
        self._promised = promised

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Read the index and the headers of all files. Raises ConfigError when files are missing or damaged."""
        if (folder / INDEX).exists():
            promised = _read_index(folder)
            return cls.of_headers(folder, map(read_header, sorted(set(promised.values()))), promised)
        path = folder / SINGLE
        if not path.exists():
            hint = "; weights in pickle files are not read" if list(folder.glob("*.bin")) else ""
            raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
        return cls.of_headers(folder, [read_header(path)])

    @classmethod
    def of_headers(
        cls, folder: Path, headers: Iterable[dict[str, Stored]], promised: dict[str, Path] | None = None
    ) -> "Checkpoint":
        """Return the tensors of files with these headers. promised: what the index says; None = there is none."""
        found = [(name, stored) for header in headers for name, stored in header.items()]
        if promised is None:
            promised = {name: stored.path for name, stored in found}
        # A tensor may lie in more files than one; the one that the index names counts.
        return cls(folder, {name: stored for name, stored in found if promised.get(name) == stored.path}, promised)

    def part(self, chosen: Callable[[str], bool]) -> "Checkpoint":
        """Return the tensors with the chosen names."""
        tensors = {name: stored for name, stored in self.tensors.items() if chosen(name)}
        return Checkpoint(self.folder, tensors, {name: at for name, at in self._promised.items() if chosen(name)})

    def find(self, name: str) -> Stored:
        """Return a tensor. Raises ConfigError when there is none of this name."""
        if name not in self._promised:
            raise ConfigError(f"{self.folder} has no tensor {name!r}; the architecture in config.json needs it")
        if name not in self.tensors:
            raise ConfigError(f"{self._promised[name]} has no tensor {name!r}, which the index says it holds")
        return self.tensors[name]


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of one file. Raises ConfigError when it is missing, and as parse_header does."""
    try:
        with path.open("rb") as file:
            return parse_header(path, path.stat().st_size, file.read)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def parse_header(path: Path, size: int, read: Callable[[int], bytes]) -> dict[str, Stored]:
    """Return the tensors of a file: a little-endian u64 length, then so many bytes of JSON, then the tensors.

    size: of the file, in bytes. read: returns the next bytes of the file, at most so many. Raises ConfigError when the
    file is damaged or shorter than its header says.
    """
    try:
        (length,) = struct.unpack("<Q", read(8))
        if length > min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"its header would have {length} bytes")
        return _parse(path, read(length), 8 + length, size)
    # msgspec's errors are ValueErrors, but for the one about too many brackets.
    except (ValueError, RecursionError, struct.error) as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None


class _Entry(msgspec.Struct):
    """A tensor in a header. data_offsets: its first byte and its end, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _parse(path: Path, header: bytes, data: int, size: int) -> dict[str, Stored]:
    """data: where the tensors begin in the file. size: of the file, in bytes."""
    tensors = {}
    for name, raw in msgspec.json.decode(header, type=dict[str, msgspec.Raw]).items():
        if name == "__metadata__":
            continue
        entry = msgspec.json.decode(raw, type=_Entry)
        axes, (begin, end) = entry.shape, entry.data_offsets
        if len(axes) > _MOST_AXES or any(length < 0 for length in axes) or not 0 <= begin <= end:
            raise ValueError(f"the place or the shape of {name!r} is impossible")
        if data + end > size:
            raise ValueError(f"{name!r} ends at byte {data + end} of {size}")
        bits, elements, room = _BITS.get(entry.dtype), math.prod(axes), 8 * (end - begin)
        # An element of a dtype that is not known here has at least one bit.
        if not (elements <= room if bits is None else elements * bits == room):
            raise ValueError(f"{name!r}, {entry.dtype} {list(axes)}, has {end - begin} bytes")
        tensors[name] = Stored(path, entry.dtype, axes, data + begin, end - begin)
    return tensors


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_index(folder: Path) -> dict[str, Path]:
    path = folder / INDEX
    try:
        promised = parse_index(path, path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    missing = sorted(at.name for at in set(promised.values()) if not at.exists())
    if missing:
        raise ConfigError(f"{folder} lacks the shards {', '.join(missing)} that its index names")
    return promised


def parse_index(path: Path, content: bytes) -> dict[str, Path]:
    """Return the file that should hold each tensor. path: of the index. Raises ConfigError when it is damaged."""
    try:
        files = msgspec.json.decode(content, type=_Index).weight_map
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not an index of safetensors files: {error}") from None
    outside = next((name for name in files.values() if Path(name).name != name), None)
    if outside is not None:
        raise ConfigError(f"{path} names a file outside of its folder: {outside!r}")
    return {tensor: path.parent / name for tensor, name in files.items()}
