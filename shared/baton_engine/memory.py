"""Divides a device's memory: the memory that steps need is set aside at start, and the KV cache gets the rest."""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from baton_common.kv_layout import LayerGroup

from .config import ConfigError, EngineConfig
from .host_memory import HostMemory

log = logging.getLogger(__name__)

# The memory that CUDA, its libraries and the kernels hold besides torch's tensors. It is not measured, because a
# process cannot distinguish it from memory that other processes take while they start.
LIBRARIES_BYTES = 512 << 20
# The memory of CUDA graphs: the tensors between their kernels, in a pool of their own, and the graphs themselves.
GRAPHS_BYTES = 1 << 30
# The share of the device that no process uses: torch's allocator needs room when the sizes of its pieces change.
_HEADROOM = 0.02
_UNMEASURED_KV_BYTES = 1 << 30


class Memory(Protocol):
    """A device's memory as this process sees it, in bytes.

    measured: whether the memory that steps need is set aside at start; otherwise they take free memory when they run.
    """

    name: str
    measured: bool

    def total(self) -> int: ...

    def free(self) -> int:
        """Return the bytes that no process holds."""

    def held(self) -> int:
        """Return the bytes that this process holds for tensors, with those that its allocator keeps for later ones."""

    def trim(self) -> None:
        """Free the memory that the allocator holds for no tensor."""


class CudaMemory:
    measured = True

    def __init__(self, device: torch.device) -> None:
        self.name = str(device)
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def trim(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class SharedMemory:
    """The equal part of a memory that one of several processes may use."""

    def __init__(self, memory: Memory, processes: int) -> None:
        self.name, self.measured = memory.name, memory.measured
        self._memory, self._processes = memory, processes

    def total(self) -> int:
        return self._memory.total() // self._processes

    def free(self) -> int:
        return self._memory.free() // self._processes

    def held(self) -> int:
        return self._memory.held()

    def trim(self) -> None:
        self._memory.trim()


def memory_of(device: torch.device) -> Memory:
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def shared_by(memory: Memory, processes: int) -> Memory:
    """Return the part of a device's memory that one of an engine's processes may use. Each has a GPU of its own."""
    return memory if memory.measured or processes == 1 else SharedMemory(memory, processes)


class KvShape(msgspec.Struct, frozen=True):
    """Bytes and tokens of one block, and how many blocks a sequence needs.

    groups: of layers, each of which has blocks of its own. step_tokens: the most that a step computes of a sequence.
    """

    block_bytes: int
    block_size: int
    max_model_len: int
    groups: tuple[LayerGroup, ...] = (LayerGroup(None, ()),)
    step_tokens: int = 0

    @property
    def least(self) -> int:
        """Blocks of the longest sequence."""
        return self.blocks(self.max_model_len)

    def longest(self, num_blocks: int) -> int:
        """Return the tokens of the longest sequence that so many blocks hold, at most max_model_len rounded up."""
        lengths = range(0, self.max_model_len + self.block_size, self.block_size)
        return lengths[bisect_right(lengths, num_blocks, key=self.blocks) - 1]

    def tokens(self, num_blocks: int) -> int:
        """Return the tokens that so many blocks hold in sequences of the greatest length."""
        return num_blocks * (-(-self.max_model_len // self.block_size) * self.block_size) // self.least

    def blocks(self, tokens: int) -> int:
        """Return the blocks of a sequence of so many tokens."""
        return sum(group.most_blocks(tokens, self.block_size, self.step_tokens) for group in self.groups)


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A device's memory, in bytes, when all but the KV cache, the CUDA graphs and the GPU pairs has been allocated.

    share: the bytes that this process may hold. forward and sampling: the temporary memory of the largest step, in two
    parts: the one that grows with the tokens of a step, and the one that more sequences add.
    """

    device: str
    total: int
    free: int
    share: int
    weights: int
    forward: int = 0
    sampling: int = 0
    graphs: int = 0
    libraries: int = 0
    pairs: int = 0

    @property
    def own(self) -> int:
        return self.weights + self.forward + self.sampling + self.graphs + self.libraries + self.pairs

    @property
    def others(self) -> int:
        """The bytes that other processes hold."""
        return max(self.total - self.free - (self.own - self.graphs - self.pairs), 0)

    @property
    def within_free(self) -> int:
        """The bytes that the KV cache can get if this process may use all free memory."""
        return self.free - self.graphs - self.pairs - int(self.total * _HEADROOM)

    @property
    def for_kv(self) -> int:
        return max(min(self.share - self.own, self.within_free), 0)

    def rows(self) -> dict[str, int]:
        """Return the bytes of each use of the memory except the KV cache."""
        parts = {
            "other processes": self.others,
            "weights": self.weights,
            "largest step": self.forward + self.sampling,
            "CUDA graphs": self.graphs,
            "libraries": self.libraries,
            "GPU pairs": self.pairs,
        }
        return {name: size for name, size in parts.items() if size}


def measure(
    memory: Memory, share: int, graphs: int, forward: Callable[[], None], sampling: Callable[[], None], pairs: int = 0
) -> Budget:
    """Return the budget of a device that holds the weights, after running the largest steps on it.

    The allocator keeps the memory of these steps, so that later steps find it there.
    """
    memory.trim()
    weights = memory.held()
    forward()
    with_forward = memory.held()
    sampling()
    with_sampling = memory.held()
    return Budget(
        device=memory.name,
        total=memory.total(),
        free=memory.free(),
        share=share,
        weights=weights,
        forward=with_forward - weights,
        sampling=with_sampling - with_forward,
        graphs=graphs,
        libraries=LIBRARIES_BYTES,
        pairs=pairs,
    )


def unmeasured(memory: Memory, weights: int) -> Budget:
    """Return the budget of a device on which nothing is set aside."""
    total = memory.total()
    return Budget(device=memory.name, total=total, free=memory.free(), share=total, weights=weights)


def check_weights(needed: int, memory: Memory, share: int, held: str) -> None:
    """Raise ConfigError when weights of so many bytes cannot be loaded; share as in Budget. held: how, in words."""
    free = memory.free()
    if needed <= min(free, share):
        return
    message = (
        f"the weights take {gib(needed)} GiB in {held}, but of the {gib(memory.total())} GiB of {memory.name} "
        f"{gib(free)} are free"
    )
    if needed <= free:
        raise ConfigError(f"{message} and this process may take {gib(share)}: raise --gpu-memory-utilization")
    raise ConfigError(
        f"{message}: {gib(needed - free)} GiB are missing. What helps: a smaller --dtype, --quantization, a smaller "
        "model, a larger device, or the end of other processes on it"
    )


def check_num_blocks(given: int | None, shape: KvShape) -> None:
    """Raise ConfigError when the blocks of --num-blocks cannot hold the longest sequence."""
    if given is not None and given < shape.least:
        raise ConfigError(
            f"{given} blocks of {shape.block_size} tokens hold {shape.longest(given)}, less than one sequence of "
            f"{shape.max_model_len}: raise --num-blocks to {shape.least} or lower --max-model-len"
        )


def choose_num_blocks(budget: Budget, shape: KvShape, config: EngineConfig, measured: bool) -> int:
    """Return the number of blocks of the KV cache. Raises ConfigError when they do not fit.

    measured: as in Memory. If it is false, the cache gets at most half of the free memory, unless one sequence needs
    more: steps take their memory while they run, and a container that runs out of memory is killed.
    """
    fits, least = budget.for_kv // shape.block_bytes, shape.least
    given = config.num_blocks
    needed = given or least
    if needed > fits:
        what = f"--num-blocks {given}" if given else f"the KV of one sequence of {shape.max_model_len} tokens"
        raise ConfigError(_shortage(budget, shape, config, needed * shape.block_bytes, what))
    if given is not None:
        return given
    if not measured:
        fits = min(fits, max(min(_UNMEASURED_KV_BYTES, budget.for_kv // 2) // shape.block_bytes, least))
    return min(fits, least * config.max_num_seqs)


def _shortage(budget: Budget, shape: KvShape, config: EngineConfig, needed: int, what: str) -> str:
    parts = ", ".join(f"{name} {gib(size)}" for name, size in budget.rows().items())
    account = f" Of {gib(budget.total)} GiB: {parts}." if parts else ""
    missing = needed - budget.for_kv
    remedies = "; ".join(_remedies(budget, shape, config, needed))
    return (
        f"{gib(missing)} GiB are missing on {budget.device}: {what} takes {gib(needed)} GiB, {gib(budget.for_kv)} are "
        f"left for the KV cache.{account} What helps: {remedies}"
    )


def _remedies(budget: Budget, shape: KvShape, config: EngineConfig, needed: int) -> list[str]:
    """Return each flag that helps, with a value that suffices or the memory that it saves."""
    remedies = []
    fits = budget.for_kv // shape.block_bytes
    if needed <= budget.within_free:
        utilization = math.ceil((budget.own + needed) / budget.total * 100) / 100
        remedies.append(f"--gpu-memory-utilization {utilization:.2f} (now {config.gpu_memory_utilization:g})")
    elif budget.others:
        remedies.append(f"the end of the other processes, which hold {gib(budget.others)} GiB")
    if config.num_blocks is not None and fits >= shape.least:
        remedies.append(f"--num-blocks {fits}, or none given")
    elif fits:
        remedies.append(f"--max-model-len {shape.longest(fits)} (now {shape.max_model_len})")
    missing = needed - budget.for_kv
    for flag, now, size, unit in (
        ("--max-num-batched-tokens", config.max_num_batched_tokens, budget.forward, 1024),
        ("--max-num-seqs", config.max_num_seqs, budget.sampling, 16),
    ):
        enough = now - math.ceil(missing * now / size) if size else 0
        if enough >= 1:
            remedies.append(f"{flag} {enough} (now {now})")
        elif size:
            remedies.append(f"a lower {flag} (now {now}): {min(unit, now)} fewer save {gib(size * unit // now)} GiB")
    if budget.pairs:
        remedies.append(f"a lower --gpu-pair-memory: GPU pairs hold {gib(budget.pairs)} GiB")
    return remedies or ["a device with more memory"]


def log_memory(budget: Budget, shape: KvShape, num_blocks: int) -> None:
    """Log where the memory goes, a line each."""
    tokens = shape.tokens(num_blocks)
    kv = num_blocks * shape.block_bytes
    for name, size in budget.rows().items():
        log.info("memory: %s %s GiB", name, gib(size), extra={"event": "memory", "part": name, "bytes": size})
    log.info(
        "memory: KV cache %s GiB, %d blocks, %d tokens, %.1f sequences of %d",
        gib(kv), num_blocks, tokens, tokens / shape.max_model_len, shape.max_model_len,
        extra={"event": "memory", "part": "KV cache", "bytes": kv, "blocks": num_blocks, "tokens": tokens},
    )  # fmt: skip


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
