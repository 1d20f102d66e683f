"""The metrics of the pods, compared with the requests that they have served."""

import re
from collections import defaultdict

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from .conftest import StartWorker
from .decode_client import DecodeClient
from .prompts import make_prompt
from .workers import Worker

# What the dashboards of vLLM's production stack, and llm-d's schedulers, ask for.
VLLM_NAMES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"),
    *("vllm:lora_requests_info", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:prompt_tokens_cached_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_bucket"),
    *("vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket"),
    *(f"vllm:request_{part}_time_seconds_bucket" for part in ("queue", "prefill", "decode", "inference")),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    "vllm:iteration_tokens_total_bucket",
    # Old names that vLLM has left, and its dashboards have not.
    *("vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total"),
    "vllm:time_per_output_token_seconds_bucket",
}
AS_PROMETHEUS_ASKS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


class Scrape:
    """The samples of one pod."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._values: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._values[sample.name].append((sample.labels, sample.value))

    @property
    def names(self) -> set[str]:
        return set(self._values)

    def __call__(self, name: str, **labels: str) -> float:
        found = [value for own, value in self._values[name] if labels.items() <= own.items()]
        assert len(found) == 1, (name, labels, self._values[name])
        return found[0]


async def scrape(worker: Worker) -> Scrape:
    line = await worker.process.logged("ready")
    async with httpx.AsyncClient(headers={"accept": AS_PROMETHEUS_ASKS}) as http:
        return Scrape((await http.get(f"http://127.0.0.1:{line['metrics_port']}/metrics")).text)


@pytest.mark.parametrize("disaggregated", [True, False])
async def test_a_request_is_measured(start_worker: StartWorker, disaggregated: bool) -> None:
    prefill = await start_worker("prefill", metrics_port=0)
    decode = await start_worker("decode", metrics_port=0)
    prompt = make_prompt(100, seed=1)
    async with DecodeClient(decode) as client:
        for _ in range(2):
            await client.ask(prompt, *[prefill] if disaggregated else [], max_tokens=20)
        gone = await client.submit(prompt, *[prefill] if disaggregated else [], max_tokens=200)
        await client.cancel(gone)
    await decode.idle()
    await prefill.idle()
    seen, at_prefill = await scrape(decode), await scrape(prefill)
    assert seen.names >= VLLM_NAMES
    assert seen("vllm:prompt_tokens_total") == 300
    assert seen("vllm:request_success_total", finished_reason="length") == 2
    assert seen("vllm:generation_tokens_total") >= 40
    assert seen("vllm:time_to_first_token_seconds_count") >= 2
    assert seen("vllm:inter_token_latency_seconds_count") >= 38
    assert seen("vllm:e2e_request_latency_seconds_count") == 2
    assert seen("vllm:request_generation_tokens_sum") == 40
    assert seen("vllm:num_requests_running") == seen("vllm:num_requests_waiting") == 0
    assert 0 <= seen("vllm:kv_cache_usage_perc") <= 1
    assert seen("vllm:iteration_tokens_total_sum") >= 38
    # Time in the queue and computing are parts of the time to the first token.
    parts = [seen(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill")]
    assert all(part > 0 for part in parts)
    assert sum(parts) < seen("vllm:time_to_first_token_seconds_sum")
    # A CPU compiles nothing, and its steps are not predicted.
    assert seen("baton_engine_compilations_total") == 0
    assert "# TYPE baton_step_time_ratio histogram" in seen.text
    by = "prefill" if disaggregated else "decode"
    assert seen("baton_prefills_total", by=by) >= 2
    assert (seen("baton_handover_exposed_seconds_count") >= 1) == disaggregated
    if disaggregated:
        assert seen("baton_handover_tokens_total") >= 100
        assert seen("baton_handover_bytes_total", way="host") > 0
        assert at_prefill("vllm:time_to_first_token_seconds_count") >= 2
        assert at_prefill("baton_pinned_blocks") == 0
    assert not re.search(r"nan", seen.text, re.IGNORECASE)
