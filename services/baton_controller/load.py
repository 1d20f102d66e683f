"""The load of a model's pods at one look, put together from what all gateways say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton_controller.counters import NOTHING, Counters
from baton_controller.report import PodReport, Report

_DEFAULT_PREFILL_RATE = 10_000.0  # as gateways assume of pods that have not measured theirs


@dataclass(frozen=True)
class Load:
    """time: seconds. queue_s: of prefill waiting at each live prefill pod. kv_use: share of its blocks that each live
    decode pod holds; decoding: its requests. waiting: requests that no pod has yet. served: what came to the counters
    since the look before."""

    time: float
    queue_s: Sequence[float] = ()
    kv_use: Sequence[float] = ()
    decoding: Sequence[int] = ()
    waiting: float = 0.0
    served: Counters = field(default=NOTHING)


def load_of(model: str, revision: str | None, reports: Mapping[str, Report], served: Counters, now: float) -> Load:
    """Return the load of a revision; of all when None."""
    seen = [
        pod
        for report in reports.values()
        for pod in report.pods
        if pod.model == model and revision in (None, pod.revision)
    ]
    prefills, decodes = (list(_merged(pod for pod in seen if pod.role == role)) for role in ("prefill", "decode"))
    return Load(
        now,
        [pod.queued_prefill_tokens / (pod.prefill_tokens_per_s or _DEFAULT_PREFILL_RATE) for pod in prefills],
        [pod.blocks_held / pod.blocks if pod.blocks else 0.0 for pod in decodes],
        [pod.requests for pod in decodes],
        sum(report.waiting.get(model, 0.0) for report in reports.values()),
        served,
    )


def _merged(pods: Iterable[PodReport]) -> Iterable[PodReport]:
    """Yield each live pod once. Every gateway knows of all its load, some of them later than others."""
    by_address: dict[str, list[PodReport]] = {}
    for pod in pods:
        by_address.setdefault(pod.address, []).append(pod)
    for views in by_address.values():
        if any(pod.live for pod in views) and not any(pod.draining for pod in views):
            yield PodReport(
                model=views[0].model,
                role=views[0].role,
                address=views[0].address,
                requests=max(pod.requests for pod in views),
                queued_prefill_tokens=max(pod.queued_prefill_tokens for pod in views),
                blocks_held=max(pod.blocks_held for pod in views),
                blocks=max(pod.blocks for pod in views),
                prefill_tokens_per_s=max(pod.prefill_tokens_per_s for pod in views),
            )
