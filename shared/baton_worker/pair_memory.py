"""Decides how much of a GPU's memory pairs with other GPUs may hold, and how many pairs fit into it."""

import logging

import msgspec
import torch

from baton_engine.memory import gib, memory_of
from baton_engine.pairs.nccl import available, warm_up

log = logging.getLogger(__name__)

# Slots are large, because a GPU sends more than a hundred megabytes in the time that the host needs for one message.
SLOT_BYTES = 256 << 20
# All pairs that send share these slots: a slot is free again as soon as its piece has left.
SEND_SLOTS = 3
# Each pair that receives has these slots: one is filled while the other is checked and written to the blocks.
LANDING_SLOTS = 2
# NCCL's own memory, measured by loadtest/handover/pair_bench.py: kernels once, and channels at either end of each pair.
_KERNELS_BYTES = 320 << 20
_SENDER_BYTES = 108 << 20
_RECEIVER_BYTES = 236 << 20
_MOST_PAIRS = 32


class PairMemory(msgspec.Struct, frozen=True):
    """most: pairs that can be open at a time. set_aside: the most bytes that they hold together."""

    most: int = 0
    set_aside: int = 0


def plan(total: int, part: float, sends: bool) -> PairMemory:
    """Return how many pairs fit into a part of `total` bytes of memory. sends: whether this end of each pair sends."""
    once, each = _KERNELS_BYTES, _RECEIVER_BYTES + LANDING_SLOTS * SLOT_BYTES
    if sends:
        once, each = _KERNELS_BYTES + SEND_SLOTS * SLOT_BYTES, _SENDER_BYTES
    most = min(max(int(total * part) - once, 0) // each, _MOST_PAIRS)
    return PairMemory(most, once + most * each) if most else PairMemory()


def set_aside(device: torch.device, part: float, sends: bool) -> PairMemory:
    """Return and log how many pairs fit into a part of a device's memory, and warm NCCL up. part: 0 = no pairs."""
    if not part or not available(device):
        return PairMemory()
    total = memory_of(device).total()
    memory = plan(total, part, sends)
    extra = {"event": "gpu_pairs", "most": memory.most, "bytes": memory.set_aside}
    if memory.most:
        log.info("room for %d GPU pairs in %s GiB that are set aside", memory.most, gib(memory.set_aside), extra=extra)
        # This runs before the engine exists, so that no CUDA graph is being captured meanwhile.
        if device.type == "cuda":
            warm_up(device)
    else:
        log.warning(
            "no GPU pair fits into %s GiB, so KV goes through the host. --gpu-pair-memory sets this limit",
            gib(int(total * part)), extra=extra,
        )  # fmt: skip
    return memory
