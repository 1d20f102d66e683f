"""The figures of a load."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton_bench.answer import Answer
from baton_bench.load import LoadResult
from baton_bench.settings import BenchSettings

PERCENTILES = (50, 90, 95, 99)
TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True)
class Slo:
    """The limits of TTFT and of the time per later token in milliseconds; None = no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @classmethod
    def of(cls, settings: BenchSettings) -> "Slo":
        return cls(settings.ttft_slo_ms, settings.tpot_slo_ms)

    @property
    def given(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met(self, answer: Answer) -> bool:
        """Return whether a request meets both limits. A cancelled or failed request does not."""
        if answer.outcome != "completed":
            return False
        return _within(answer.ttft, self.ttft_ms) and _within(answer.tpot, self.tpot_ms)


def _within(seconds: float | None, most_ms: float | None) -> bool:
    return seconds is None or most_ms is None or seconds * 1e3 <= most_ms


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, with linear interpolation between the two nearest."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def times_of(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Return sorted times in milliseconds, by name. Failed requests are left out."""
    good = [answer for answer in answers if answer.outcome != "failed"]
    seconds: dict[str, Iterable[float | None]] = {
        "ttft_ms": [answer.ttft for answer in good],
        "itl_ms": [gap for answer in good for gap in answer.gaps],
        "tpot_ms": [answer.tpot for answer in good],
        "e2e_ms": [answer.e2e for answer in good],
    }
    return {name: sorted(value * 1e3 for value in values if value is not None) for name, values in seconds.items()}


def summarize(result: LoadResult, slo: Slo) -> dict[str, Any]:
    """Return the figures. Completed requests and tokens are divided by the time to the end of the last answer. The
    offered rate and the goodput refer to the time in which requests arrived."""
    plan, answers = result.plan, result.answers
    outcomes = Counter(answer.outcome for answer in answers)
    duration = max((answer.end for answer in answers), default=0.0) or 1.0
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in answers)
    summary: dict[str, Any] = {
        "target": result.target,
        "load": plan.name,
        "offered_req_s": plan.rate,
        "requests": len(answers),
        "completed": outcomes["completed"],
        "cancelled": outcomes["cancelled"],
        "failed": outcomes["failed"],
        "errors": dict(Counter(answer.error for answer in answers if answer.error)),
        "error_example": next((f"{a.error}: {a.detail}" for a in answers if a.error), ""),
        "turns_not_sent": plan.requests - len(answers),
        "too_long_dropped": plan.dropped,
        "too_long_clipped": plan.clipped,
        "duration_s": duration,
        "req_s": outcomes["completed"] / duration,
        "input_tok_s": prompt_tokens / duration,
        "output_tok_s": sum(answer.tokens for answer in answers) / duration,
        "cached_share": sum(answer.cached_tokens for answer in answers) / prompt_tokens if prompt_tokens else 0.0,
        "prompts_of_other_length": sum(
            answer.prompt_tokens is not None and answer.prompt_tokens != answer.inputs for answer in answers
        ),
        **{name: _spread(values) for name, values in times_of(answers).items()},
        "client_late_ms": _spread(sorted((answer.sent - answer.due) * 1e3 for answer in answers)),
        "client_stalled_ms": _spread(sorted(tick * 1e3 for tick in result.ticks)),
    }
    if slo.given:
        met = sum(map(slo.met, answers))
        summary["slo_share"] = met / len(answers) if answers else 0.0
        summary["goodput_req_s"] = met / plan.seconds if plan.seconds else 0.0
    return summary


def _spread(ordered: Sequence[float]) -> dict[str, float] | None:
    """Return None for no values."""
    if not ordered:
        return None
    spread = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **spread, "max": ordered[-1]}
