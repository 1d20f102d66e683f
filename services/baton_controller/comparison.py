"""Compares a canary's counters with stable's, and describes the figures for Events and logs."""

from dataclasses import dataclass

from baton_controller import evidence
from baton_controller.config_file import CanarySpec
from baton_controller.counters import Buckets, Counters, quantile


@dataclass(frozen=True)
class Excess:
    """One measure of the canary that is beyond its limit.

    figures: the measure as text. chance: the probability of a difference this large if both revisions are the same.
    """

    figures: str
    chance: float

    @property
    def text(self) -> str:
        if self.chance >= 0.1:
            return f"{self.figures}; identical revisions differ so much in {self.chance:.0%} of comparisons"
        times = f"1 of {1 / self.chance:,.0f}" if self.chance > 1e-6 else "fewer than 1 of 1,000,000"
        return f"{self.figures}; identical revisions differ so much in {times} comparisons"


def excesses(canary: Counters, stable: Counters, spec: CanarySpec) -> list[Excess]:
    """Return the measures that are beyond their limits, including those that may be beyond by chance."""
    found = []
    if canary.error_rate - stable.error_rate > spec.max_error_rate_increase:
        found.append(
            Excess(
                f"{canary.error_rate:.2%} of {canary.requests:.0f} requests failed, on {spec.stable} "
                f"{stable.error_rate:.2%} of {stable.requests:.0f} (limit: {spec.max_error_rate_increase:.2%} more)",
                evidence.fisher(canary.error, canary.requests, stable.error, stable.requests),
            )
        )
    found += _slower("TTFT", canary.ttft, stable.ttft, spec.stable, spec.max_ttft_p95_ratio)
    found += _slower("TPOT", canary.tpot, stable.tpot, spec.stable, spec.max_tpot_p95_ratio)
    return found


def fails_outright(canary: Counters, stable: Counters, spec: CanarySpec, rate: float) -> bool:
    """Return whether the canary fails so often that it can be judged at once. rate: the allowed false-alarm rate."""
    return evidence.fails_outright(
        canary.error, canary.requests, stable.error, stable.requests, spec.max_error_rate_increase, rate
    )


def figures(counters: Counters) -> str:
    parts = [f"{counters.requests:.0f} requests, {counters.error_rate:.2%} failed"]
    for name, buckets in (("TTFT", counters.ttft), ("TPOT", counters.tpot)):
        if (p95 := quantile(buckets, 0.95)) is not None:
            parts.append(f"{name} p95 {p95 * 1e3:.1f} ms")
    return ", ".join(parts)


def _slower(name: str, canary: Buckets, stable: Buckets, stable_name: str, limit: float) -> list[Excess]:
    p95, stable_p95 = quantile(canary, 0.95), quantile(stable, 0.95)
    # Requests that failed have no TTFT, and requests of one token have no TPOT.
    if p95 is None or stable_p95 is None:
        return []
    found = []
    if p95 > limit * stable_p95:
        text = f"{name} p95 is {p95 * 1e3:.1f} ms, on {stable_name} {stable_p95 * 1e3:.1f} ms (limit: {limit:g} times)"
        found.append(Excess(text, evidence.tail(canary, stable)))
    if (ratio := evidence.ratio(canary, stable)) > limit:
        text = f"{name} is {ratio:.2f} times that of {stable_name} on average (limit: {limit:g} times)"
        found.append(Excess(text, evidence.slower(canary, stable)))
    return found
