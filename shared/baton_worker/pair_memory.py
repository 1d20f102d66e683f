"""How much of a GPU's memory its pairs with other GPUs may hold, and how many pairs that is."""

import logging

import msgspec
import torch

from baton_engine.memory import gib, memory_of
from baton_kv.nccl import available, warm_up

log = logging.getLogger(__name__)

# Between GPUs the work of the host for a message is worth more than a hundred megabytes.
SLOT_BYTES = 256 << 20
# All pairs that send share these: a slot is free again as soon as its piece has left.
SEND_SLOTS = 3
# Of each pair that receives: one is filled while the other is checked and written to its blocks.
LANDING_SLOTS = 2
# NCCL's own, as loadtest/handover/pair_bench.py measures it: kernels once, then channels at either end of a pair.
_KERNELS_BYTES = 320 << 20
_SENDER_BYTES = 108 << 20
_RECEIVER_BYTES = 236 << 20
_MOST_PAIRS = 32


class PairMemory(msgspec.Struct, frozen=True):
    """most: pairs at a time. set_aside: bytes that these hold together, at most."""

    most: int = 0
    set_aside: int = 0


def plan(total: int, part: float, sends: bool) -> PairMemory:
    """Return what a part of so many bytes of memory is enough for. sends: whether this end of each pair sends."""
    once, each = _KERNELS_BYTES, _RECEIVER_BYTES + LANDING_SLOTS * SLOT_BYTES
    if sends:
        once, each = _KERNELS_BYTES + SEND_SLOTS * SLOT_BYTES, _SENDER_BYTES
    most = min(max(int(total * part) - once, 0) // each, _MOST_PAIRS)
    return PairMemory(most, once + most * each) if most else PairMemory()


def set_aside(device: torch.device, part: float, sends: bool) -> PairMemory:
    """Return what pairs may hold on a device, and say it; make NCCL ready for them. part: 0 = none are wanted."""
    if not part or not available(device):
        return PairMemory()
    total = memory_of(device).total()
    memory = plan(total, part, sends)
    extra = {"event": "gpu_pairs", "most": memory.most, "bytes": memory.set_aside}
    if memory.most:
        log.info("room for %d GPU pairs, in %s GiB that are set aside", memory.most, gib(memory.set_aside), extra=extra)
        # Before the engine, so that no CUDA graph is being captured.
        if device.type == "cuda":
            warm_up(device)
    else:
        log.warning(
            "no room for a GPU pair in %s GiB: KV comes and goes through the host, unless --gpu-pair-memory is raised",
            gib(int(total * part)), extra=extra,
        )  # fmt: skip
    return memory
