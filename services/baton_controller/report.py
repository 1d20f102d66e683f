"""Parses one gateway's report about models and pods, which its admin port serves."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton_controller.counters import MOST, Buckets, Counters, Reading

_PREFIX = "baton_gateway_"
_REQUESTS = _PREFIX + "revision_requests"
_TTFT = _PREFIX + "revision_time_to_first_token_seconds"
_TPOT = _PREFIX + "revision_time_per_output_token_seconds"
_WAITING = _PREFIX + "requests_waiting"
_OUTCOMES = ("ok", "error")
_MOST_BUCKETS = 100  # of one histogram, so that the state of a canary stays small


class PodReport(msgspec.Struct, frozen=True):
    """One gateway's view of a pod. requests: those decoding there; queued_prefill_tokens: those not yet computed."""

    model: str
    role: str
    address: str
    revision: str = ""
    live: bool = False
    draining: bool = False
    requests: int = 0
    queued_prefill_tokens: int = 0
    blocks_held: int = 0
    blocks: int = 0
    prefill_tokens_per_s: float = 0.0


class _Pods(msgspec.Struct):
    pods: list[PodReport]


@dataclass(frozen=True)
class Report:
    """The report of one gateway. readings: by model; waiting: requests that no pod has yet, by model."""

    readings: dict[str, Reading] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    pods: list[PodReport] = field(default_factory=list)


def parse_report(metrics: str, pods: bytes) -> Report:
    """Return the report. metrics, pods: bodies of /metrics and /pods. Raises ValueError when one is invalid."""
    families = {family.name: family.samples for family in text_string_to_metric_families(metrics)}
    waiting: dict[str, float] = {}
    for sample in families.get(_WAITING, ()):
        model = sample.labels["model"]
        waiting[model] = waiting.get(model, 0.0) + _count(sample)
    return Report(_readings(families), waiting, msgspec.json.decode(pods, type=_Pods).pods)


def _readings(families: dict[str, list[Sample]]) -> dict[str, Reading]:
    counters: dict[str, dict[str, Counters]] = {}

    def of(sample: Sample) -> Counters:
        return counters.setdefault(sample.labels["model"], {}).setdefault(sample.labels["revision"], _empty())

    for sample in families.get(_REQUESTS, ()):
        if sample.name == _REQUESTS + "_total":
            found = of(sample)
            if sample.labels["outcome"] not in _OUTCOMES:
                raise ValueError(f"{sample.name} has an unknown outcome {sample.labels['outcome']!r}")
            change = {sample.labels["outcome"]: _count(sample)}
            counters[sample.labels["model"]][sample.labels["revision"]] = msgspec.structs.replace(found, **change)
    for sample in _buckets(families, _TTFT):
        _add(of(sample).ttft, sample)
    for sample in _buckets(families, _TPOT):
        _add(of(sample).tpot, sample)
    # The process started to count when it created the first of these counters. In this text format the creation time
    # is a family of its own.
    made = [_count(sample) for name in (_REQUESTS, _TTFT, _TPOT) for sample in families.get(name + "_created", ())]
    started = min(made, default=0.0)
    return {model: Reading(started, revisions) for model, revisions in counters.items()}


def _buckets(families: dict[str, list[Sample]], name: str) -> Iterable[Sample]:
    return (sample for sample in families.get(name, ()) if sample.name == name + "_bucket")


def _add(buckets: Buckets, sample: Sample) -> None:
    le = sample.labels["le"]
    if not float(le) > 0:
        raise ValueError(f"{sample.name} has a bucket up to {le}")
    buckets[le] = _count(sample)
    if len(buckets) > _MOST_BUCKETS:
        raise ValueError(f"{sample.name} has more than {_MOST_BUCKETS} buckets")


def _count(sample: Sample) -> float:
    value = float(sample.value)
    if not (math.isfinite(value) and 0 <= value <= MOST):
        raise ValueError(f"{sample.name} is {value}, which is not a count")
    return value


def _empty() -> Counters:
    return Counters(ttft={}, tpot={})
