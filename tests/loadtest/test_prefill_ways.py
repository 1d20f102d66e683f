"""The bench of prefill attention: its reference, its count of operations, and ways that fail."""

import pytest
import torch

from baton_kernels.reference.paged_attention import AttentionVariant, paged_attention_reference
from loadtest.engine import attention_bench
from loadtest.engine.prefill_ways import Chunks, Run


def exactly(chunks: Chunks) -> Run:
    lengths = torch.tensor([chunks.length] * chunks.sequences)
    starts = torch.tensor(chunks.starts)
    return lambda: paged_attention_reference(
        chunks.q, chunks.keys, chunks.values, chunks.tables, lengths, starts, chunks.variant
    )


@pytest.mark.parametrize(("window", "softcap", "sinks"), [(0, 0.0, False), (20, 0.0, True), (0, 3.0, False)])
def test_errors_and_operations_are_those_of_the_definition(window: int, softcap: float, sinks: bool) -> None:
    tables = torch.randperm(6, dtype=torch.int32).view(2, 3)
    keys, values = torch.randn(2, 6, 16, 1, 8)
    how = AttentionVariant(0.3, window, softcap, sinks=torch.randn(2) if sinks else None)
    chunks = Chunks(torch.randn(20, 2, 8), keys, values, tables, 10, 40, how)
    out = exactly(chunks)()
    assert chunks.error(out) < 1e-6
    assert chunks.error(out + 0.1 * out.norm() / out.numel() ** 0.5) == pytest.approx(0.1, rel=0.5)
    seen = sum(key <= at and (not window or at - key < window) for at in range(30, 40) for key in range(40))
    assert chunks.operations == 2 * 2 * 2 * 2 * seen * 8


def test_a_way_that_fails_is_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Chunks) -> Run:
        raise RuntimeError("no plan for\nthese sizes")

    monkeypatch.setattr(attention_bench, "WAYS", {"exact": exactly, "broken": broken})
    monkeypatch.setattr(attention_bench, "PREFILLS", [(2, 10, 70, 0, 0.0, False)])
    monkeypatch.setattr(attention_bench, "seconds_of", lambda *_, **__: 1e-6)
    attention_bench.print_prefills(2, 1, 8, ["broken", "exact"], torch.device("cpu"))
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[4] for row in rows] == ["broken", "exact"]
    assert r"RuntimeError: 'no plan for\nthese sizes'" in rows[0]
    assert float(rows[1].split(" | ")[-1].strip(" |")) < 0.01
