"""The load of a model's pods at one time, merged from the reports of all gateways."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton_controller.counters import NOTHING, Counters
from baton_controller.report import PodReport, Report

_DEFAULT_PREFILL_RATE = 10_000.0  # tokens a second; gateways assume it too for pods that have not measured their rate


@dataclass(frozen=True)
class Load:
    """A sample of a model's load. time: seconds. queue_s: seconds of queued prefill of each live prefill pod. kv_use:
    share of held KV blocks of each live decode pod; decoding: its requests. waiting: requests that no pod has yet.
    served: the increase of the counters since the previous sample."""

    time: float
    queue_s: Sequence[float] = ()
    kv_use: Sequence[float] = ()
    decoding: Sequence[int] = ()
    waiting: float = 0.0
    served: Counters = field(default=NOTHING)


def load_of(model: str, revision: str | None, reports: Mapping[str, Report], served: Counters, now: float) -> Load:
    """Return the load of a revision; None: of all revisions together."""
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
    """Yield each live pod once. Every gateway reports a pod's total load, but some reports are older than others."""
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
