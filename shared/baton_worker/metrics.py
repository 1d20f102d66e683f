"""A worker's Prometheus metrics. Those that vLLM has too use its names, so that dashboards made for vLLM work."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from baton_common.histogram import Histogram
from baton_common.peer_refusals import PeerRefusals
from baton_engine.delta import Load

from .messages import Ready
from .request_metrics import RequestMetrics
from .traced_histogram import TracedHistogram

_ENGINE = "0"  # a pod has one engine
# All values of these labels exist from the start, because Prometheus sees no increase in a counter that begins at 1.
_REASONS = ("checksum", "epoch", "generation", "range", "stale", "ticket")
_ENDED = dict.fromkeys(("stop", "length", "abort", "error"), 0)
_WAYS = {"host": 0, "gpu": 0}
_PAIRS = ("pair_refused", "refused_announcement")
_EVENTS = dict.fromkeys(("failed", "lease_expired", "timeout", *_PAIRS, *(f"refused_{name}" for name in _REASONS)), 0)


class Counts(Protocol):
    """The counts that prefill and decode pods each keep in their own way."""

    draining: bool
    events: Counter[str]

    @property
    def num_tickets(self) -> int: ...

    @property
    def handed_over_tokens(self) -> int: ...


class WorkerCollector(Collector):
    """Reads the worker's counts at each scrape."""

    def __init__(
        self,
        model: str,
        revision: str,
        role: str,
        ready: Ready,
        requests: RequestMetrics,
        load: Callable[[], Load],
        counts: Counts,
        refusals: PeerRefusals,
    ) -> None:
        """load: returns the last load that the engine reported."""
        self._ready = ready
        self._requests = requests
        self._load = load
        self._counts = counts
        self._refusals = refusals
        self._vllm = {"model_name": model, "engine": _ENGINE}
        self._baton = {"model": model, "revision": revision}
        self._role = role

    def registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def collect(self) -> Iterable[Metric]:
        text = "1 for each pod. The label role is its kind."
        yield _gauge("baton_worker_info", text, {**self._baton, "role": self._role}, 1)
        if self._ready.num_threads:
            text = "Threads of the engine on CPU, by what they do while they wait: sleep or spin."
            waiting = "spin" if self._ready.threads_spin else "sleep"
            yield _gauge("baton_engine_threads", text, {**self._baton, "waiting": waiting}, self._ready.num_threads)
        text = "Kernels that were compiled or loaded after the pod was ready, each of which halted all of its requests."
        yield _counter("baton_engine_compilations", text, self._baton, self._load().compilations)
        yield _histograms(
            "baton_step_time_ratio",
            "Time of an engine's step, divided by the predicted time, by kind of step.",
            self._baton,
            "kind",
            self._load().step_ratios,
        )
        yield _counters(
            "baton_peer_refusals",
            "Calls and bulk connections refused because nothing proved that they came from a pod of this release.",
            self._baton,
            "port",
            self._refusals.counts,
        )
        yield _counters(
            "baton_peer_messages_refused",
            "Messages of peers that the pod refused to act on, by reason.",
            self._baton,
            "reason",
            self._refusals.messages,
        )
        yield from self._vllm_gauges()
        yield from self._vllm_counters()
        yield from self._vllm_histograms()
        yield from self._handover()

    def _vllm_gauges(self) -> Iterable[Metric]:
        load, ready = self._load(), self._ready
        for name, text, value in (
            ("num_requests_running", "Requests in the batch of the engine.", load.running),
            ("num_requests_waiting", "Requests that wait to be computed.", load.waiting),
            ("kv_cache_usage_perc", "Part of the KV blocks that is in use, from 0 to 1.", _share(load, ready)),
            ("gpu_cache_usage_perc", "Old name of kv_cache_usage_perc.", _share(load, ready)),
        ):
            yield _gauge(f"vllm:{name}", text, self._vllm, value)
        config = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)}
        config["cache_dtype"] = ready.layout.planes[0].dtype
        yield _gauge("vllm:cache_config_info", "How the KV cache is laid out.", {**config, "engine": _ENGINE}, 1)
        loras = {"running_lora_adapters": "", "waiting_lora_adapters": "", "max_lora": "0"}
        yield _gauge("vllm:lora_requests_info", "No adapters are served.", loras, 0)

    def _vllm_counters(self) -> Iterable[Metric]:
        load, requests = self._load(), self._requests
        for name, text, value in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", load.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", load.prefix_hits),
            ("gpu_prefix_cache_queries", "Old name of prefix_cache_queries.", load.prefix_queries),
            ("gpu_prefix_cache_hits", "Old name of prefix_cache_hits.", load.prefix_hits),
            ("num_preemptions", "How often a request lost its blocks to another.", load.preemptions),
            ("prompt_tokens", "Tokens of prompts.", requests.prompt_tokens),
            ("prompt_tokens_cached", "Tokens of prompts that were not computed.", requests.cached_tokens),
            ("generation_tokens", "Tokens generated.", requests.generation_tokens),
        ):
            yield _counter(f"vllm:{name}", text, self._vllm, value)
        ended = {**_ENDED, **requests.ended}
        yield _counters("vllm:request_success", "Requests that ended.", self._vllm, "finished_reason", ended)

    def _vllm_histograms(self) -> Iterable[Metric]:
        requests = self._requests
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival at the pod to its first token.", requests.ttft),
            ("inter_token_latency_seconds", "Time between two tokens of a request.", requests.inter_token),
            ("time_per_output_token_seconds", "Old name of inter_token_latency_seconds.", requests.inter_token),
            ("e2e_request_latency_seconds", "From a request's arrival at the pod to its end.", requests.e2e),
            ("request_queue_time_seconds", "From a prompt's arrival to the start of its prefill.", requests.queued),
            ("request_prefill_time_seconds", "From the start of a prefill to the first token.", requests.prefill),
            ("request_decode_time_seconds", "From the first token to the last.", requests.decode),
            ("request_inference_time_seconds", "Time of a request without its time in the queue.", requests.inference),
            ("request_prompt_tokens", "Tokens of a prompt.", requests.prompt_lengths),
            ("request_generation_tokens", "Tokens of an answer.", requests.generation_lengths),
            ("iteration_tokens_total", "Tokens that a step computes.", self._load().step_tokens),
        ):
            if histogram is not None:
                yield _histogram(f"vllm:{name}", text, self._vllm, histogram)

    def _handover(self) -> Iterable[Metric]:
        load, requests, counts = self._load(), self._requests, self._counts
        yield _gauge("baton_worker_draining", "1 when the pod takes no new requests.", self._baton, counts.draining)
        yield _gauge("baton_gpu_pairs_max", "GPU pairs that there is memory for.", self._baton, self._ready.gpu_pairs)
        yield _gauge("baton_open_tickets", "Hand-overs in progress.", self._baton, counts.num_tickets)
        yield _gauge(
            "baton_pinned_blocks", "KV blocks kept until decode pods have their KV.", self._baton, load.blocks_pinned
        )
        yield _counters(
            "baton_prefills",
            "Prompts by the kind of pod that computed them.",
            self._baton,
            "by",
            {"prefill": 0, "decode": 0, **requests.prefills},
        )
        tokens = counts.handed_over_tokens
        yield _counter("baton_handover_tokens", "Tokens whose KV other pods sent.", self._baton, tokens)
        pieces, piece_bytes = {**_WAYS, **requests.pieces}, {**_WAYS, **requests.piece_bytes}
        yield _counters("baton_handover_pieces", "Pieces of KV that other pods sent.", self._baton, "way", pieces)
        yield _counters("baton_handover_bytes", "Bytes of KV that other pods sent.", self._baton, "way", piece_bytes)
        yield _counters(
            "baton_handover_events",
            "Problems with hand-overs: failed, lease_expired, timeout, pair_refused, or refused_ with a reason.",
            self._baton,
            "event",
            {**_EVENTS, **counts.events},
        )
        yield _histogram(
            "baton_handover_exposed_seconds",
            "From the first tokens of a prompt that a prefill pod computed until all of its KV has arrived.",
            self._baton,
            requests.exposed_handover,
        )


def _share(load: Load, ready: Ready) -> float:
    return load.blocks_held / max(ready.num_blocks, 1)


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counters(name: str, text: str, labels: Mapping[str, str], label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter for each value of one more label."""
    family = CounterMetricFamily(name, text, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def _histogram(name: str, text: str, labels: Mapping[str, str], histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    _add_histogram(family, list(labels.values()), histogram)
    return family


def _histograms(
    name: str, text: str, labels: Mapping[str, str], label: str, histograms: Mapping[str, Histogram]
) -> Metric:
    """Return a histogram for each value of one more label."""
    family = HistogramMetricFamily(name, text, labels=[*labels, label])
    for key, histogram in histograms.items():
        _add_histogram(family, [*labels.values(), key], histogram)
    return family


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    exemplars = histogram.exemplars if isinstance(histogram, TracedHistogram) else {}
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    seen = 0
    for number, bound in enumerate((*histogram.bounds, float("inf"))):
        seen += histogram.counts[number]
        le: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
        buckets.append((le, seen, exemplars[number]) if number in exemplars else (le, seen))
    family.add_metric(labels, buckets, histogram.total)
