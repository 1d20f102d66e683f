"""The parts of the NCCL module that need no GPU."""

import os

import torch

from baton_engine.pairs import nccl


def test_a_cpu_is_no_end_of_a_communicator() -> None:
    assert not nccl.available(torch.device("cpu"))


def test_ids_reach_the_library_whole() -> None:
    """They hold zeros."""
    unique_id = bytes([0, 1, 0]) + os.urandom(nccl.UNIQUE_ID_BYTES - 3)
    assert bytes(nccl._UniqueId.from_buffer_copy(unique_id)) == unique_id
