"""How much of its weights a kernel prefetches."""

from types import SimpleNamespace

import pytest
import torch

from baton_kernels import overlap
from baton_kernels.kernel_configs import LinearConfig

GPU = torch.device("cuda", 0)


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have a GPU with 100 multiprocessors that overlaps kernels, and 32 MiB for what is prefetched."""
    monkeypatch.setattr(overlap, "_AHEAD_BYTES", 32 << 20)
    monkeypatch.setattr(overlap, "overlap_options", lambda _: {"OVERLAP": True})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=100))


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    ("outputs", "row_bytes", "gated", "splits", "lines"),
    [
        # All that the programs read, as there is room for it.
        (4096, 1024, False, 1, 8),
        (4096, 4096, False, 4, 8),
        # A power of two of lines, and whole ones.
        (4096, 1000, False, 1, 4),
        (4096, 100, False, 1, 0),
        # 32 MiB for 12,800 rows that are read at once, and for twice as many.
        (12_800, 1 << 20, False, 1, 16),
        (256_000, 1 << 20, False, 1, 16),
        (3200, 1 << 20, False, 4, 16),
        (12_800, 1 << 20, True, 1, 8),
    ],
)
def test_all_programs_share_what_they_may_prefetch(
    outputs: int, row_bytes: int, gated: bool, splits: int, lines: int
) -> None:
    config = LinearConfig(16, 64, 128, splits, 4, 4)
    assert overlap.lines_ahead.__wrapped__(outputs, row_bytes, gated, config, GPU) == lines


def test_nothing_is_prefetched_where_kernels_do_not_overlap() -> None:
    assert overlap.lines_ahead(4096, 1024, False, LinearConfig(16, 64, 128, 1, 4, 4), torch.device("cpu")) == 0
