"""min_p, top_k and top_p as a threshold, against the reference and against their definitions in float64."""

from typing import Any

import pytest
import torch

VOCABS = [17, 1000, 5003]


def arguments(logits: torch.Tensor, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `thresholds` for one dict of settings per row of logits."""

    def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([row.get(name, off) for row in rows], dtype=dtype, device=logits.device)

    temperature, top_p, min_p = column("temperature", 1.0), column("top_p", 1.0), column("min_p", 0.0)
    return logits, temperature, column("top_k", 0, torch.int64), top_p, min_p


def check(logits: torch.Tensor, threshold: torch.Tensor, row: dict[str, Any], slack: float = 2e-5) -> None:
    """Check which tokens the threshold of one row [vocab] keeps; slack is in units of probability."""
    values, threshold = logits.double(), threshold.double()
    scaled = values / row.get("temperature", 1.0)
    kept = torch.isfinite(values)
    if row.get("min_p"):
        floor = scaled.max() + torch.tensor(row["min_p"], dtype=torch.float64).log()
        inside = scaled >= floor - slack * max(1, float(floor.abs()))
        assert (inside | (values < threshold)).all()
        kept &= scaled >= floor
    if 0 < row.get("top_k", 0) < len(values):
        kept &= values >= values.sort(descending=True).values[row["top_k"] - 1]
    if row.get("top_p", 1.0) < 1:
        weights = torch.where(kept, (scaled - scaled.max()).exp(), 0)
        weights /= weights.sum()
        assert kept[values >= threshold].all() or row.get("min_p")
        assert weights[values > threshold].sum() < row["top_p"] + slack
        assert weights[values >= threshold].sum() >= row["top_p"] - slack
    elif row.get("min_p"):
        assert not (kept & (values < threshold)).any()
    else:
        assert torch.equal(values >= threshold, kept | (threshold == float("-inf")))


SETTINGS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 16, "temperature": 0.01},
    {"top_k": 900},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 3.0},
    {"top_p": 1e-6},
    {"top_p": 0.9999, "temperature": 0.5},
    {"top_p": 0.95, "temperature": 1e-5},
    {"top_p": 0.95, "temperature": 1e6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-6, "temperature": 2.5},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 50, "min_p": 0.01},
    {"min_p": 0.02, "top_k": 12, "top_p": 0.9},
    {},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", VOCABS)
def test_keeps_what_the_definitions_keep(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    from baton_kernels.reference.thresholds import thresholds_reference
    from baton_kernels.thresholds import thresholds

    logits = (torch.randn(len(SETTINGS), vocab, device=device) * 4).to(dtype)
    ours = thresholds(*arguments(logits, SETTINGS))
    for which in (ours, thresholds_reference(*arguments(logits, SETTINGS))):
        for row, threshold, setting in zip(logits, which, SETTINGS, strict=True):
            if setting.get("temperature") != 0.0:
                check(row, threshold, setting)
    assert ours[-2:].tolist() == [float("-inf")] * 2


def test_agrees_with_the_reference(device: torch.device) -> None:
    from baton_kernels.reference.thresholds import thresholds_reference
    from baton_kernels.thresholds import thresholds

    for scale in (0.1, 1, 10):
        # Few tokens, so that none is near enough to the edge of top_p for rounding to matter.
        logits = torch.randn(len(SETTINGS), 17, device=device) * scale
        inputs = arguments(logits, SETTINGS)
        ours, theirs = ((logits >= f(*inputs).unsqueeze(1)) for f in (thresholds, thresholds_reference))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_logits_stay_together(device: torch.device, dtype: torch.dtype) -> None:
    from baton_kernels.reference.thresholds import thresholds_reference
    from baton_kernels.thresholds import thresholds

    logits = torch.full((6, 1000), -3.0, device=device, dtype=dtype)
    logits[:, 10:14], logits[:, 500:503] = 2.0, 5.0
    logits[3:5, :500] = 0.0
    logits[3:5, 500:] = -0.0
    # The best three hold e^3 times as much as each of the four after them: 0.8 is reached within the four.
    settings = [{"top_k": 4}, {"top_k": 2}, {"top_p": 0.9}, {"top_k": 1}, {"top_p": 0.1}, {"top_p": 0.8}]
    inputs = arguments(logits, settings)
    for function in (thresholds, thresholds_reference):
        kept = (logits >= function(*inputs).unsqueeze(1)).sum(dim=-1)
        assert kept.tolist() == [7, 3, 7, 1000, 1000, 3]


def test_infinite_logits_are_never_needed(device: torch.device) -> None:
    from baton_kernels.reference.thresholds import thresholds_reference
    from baton_kernels.thresholds import thresholds

    logits = torch.full((5, 1000), float("-inf"), device=device)
    logits[:4, [3, 700, 999]] = torch.tensor([1.0, 4.0, 2.0], device=device)
    inputs = arguments(logits, [{"top_k": 2}, {"top_k": 10}, {"top_p": 0.999}, {"min_p": 0.2}, {"top_k": 3}])
    for function in (thresholds, thresholds_reference):
        kept = (logits >= function(*inputs).unsqueeze(1)) & torch.isfinite(logits)
        assert kept.sum(dim=-1).tolist() == [2, 3, 3, 1, 0]


def test_top_p_that_falls_between_two_tokens(device: torch.device) -> None:
    from baton_kernels.thresholds import thresholds

    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3], device=device)
    settings = [{"top_p": p} for p in (0.49, 0.51, 0.79, 0.81, 0.94, 0.96)]
    logits = probabilities.log().expand(len(settings), -1).contiguous()
    kept = (logits >= thresholds(*arguments(logits, settings)).unsqueeze(1)).sum(dim=-1)
    assert kept.tolist() == [1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_does_not_depend_on_the_others(device: torch.device, dtype: torch.dtype) -> None:
    from baton_kernels.thresholds import thresholds

    # All tokens are about as likely, so that another order of additions would change the result.
    logits = (torch.randn(9, 5003, device=device) * 0.2).to(dtype)
    settings = [{"top_p": 0.1 * (i + 1), "top_k": i * 700} for i in range(9)]
    together = thresholds(*arguments(logits, settings))
    for row in (0, 4, 8):
        assert torch.equal(
            thresholds(*arguments(logits[row : row + 1].clone(), settings[row : row + 1]))[0], together[row]
        )
    assert torch.equal(thresholds(*arguments(logits, settings)), together)


def test_every_row_is_written(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton_kernels.thresholds import thresholds

    logits = torch.randn(len(SETTINGS), 17, device=device)
    monkeypatch.setattr(torch, "empty", lambda shape, **how: torch.full((shape,), float("nan"), **how))
    assert not thresholds(*arguments(logits, SETTINGS)).isnan().any()
    assert (thresholds(*arguments(logits, [{}] * len(SETTINGS))) == float("-inf")).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_extremes_of_the_dtype(device: torch.device, dtype: torch.dtype) -> None:
    from baton_kernels.thresholds import thresholds

    info = torch.finfo(dtype)
    values = [info.max, 1.0, info.tiny * 2, info.tiny, 0.0, -info.tiny, -1.0, info.min]
    logits = torch.tensor(values, device=device).to(dtype).expand(len(values), -1).contiguous()
    settings = [{"top_k": k + 1} for k in range(len(values))]
    settings[-1] = {}
    kept = (logits >= thresholds(*arguments(logits, settings)).unsqueeze(1)).sum(dim=-1)
    assert kept.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
