"""How much of its weights a kernel prefetches."""

from types import SimpleNamespace

import pytest
import torch

from baton_kernels import overlap

GPU = torch.device("cuda", 0)


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have a GPU with 100 multiprocessors that overlaps kernels."""
    monkeypatch.setattr(overlap, "overlap_options", lambda _: {"OVERLAP": True})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=100))


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    ("programs", "rows", "row_bytes", "lines"),
    [
        # All that the programs read, as there is room for it.
        (64, 64, 1024, 8),
        # A power of two of lines, and whole ones.
        (64, 64, 1000, 4),
        (64, 64, 100, 0),
        # 32 MiB for 12,800 rows that are read at once.
        (200, 64, 1 << 20, 16),
        (4000, 64, 1 << 20, 16),
    ],
)
def test_all_programs_share_what_they_may_prefetch(programs: int, rows: int, row_bytes: int, lines: int) -> None:
    assert overlap.lines_ahead.__wrapped__(programs, rows, row_bytes, GPU) == lines


def test_nothing_is_prefetched_where_kernels_do_not_overlap() -> None:
    assert overlap.lines_ahead(64, 64, 1024, torch.device("cpu")) == 0
