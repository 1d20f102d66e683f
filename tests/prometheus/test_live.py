"""A Prometheus that scrapes a running Baton has every metric that dashboards and alerts query."""

import asyncio
import math
import re
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.stack import MODEL_NAME
from tests.e2e.test_metrics import VLLM_NAMES

from .conftest import DASHBOARDS, LOOP, Watched
from .grafana import Dashboard

pytestmark = [pytest.mark.asyncio(loop_scope=LOOP), pytest.mark.timeout(120)]

# Panels of what does not happen here: no controller, no Redis.
NOTHING_THERE = {("overview", "Desired replicas"), ("overview", "Redis"), ("canary", "Weight"), ("canary", "Rollbacks")}
# The steps of a CPU are not predicted.
NOTHING_THERE |= {(f"{role}-pool", "Time of steps, by the prediction") for role in ("prefill", "decode")}
# Likewise, metrics of the alerts.
NOT_HERE = {"baton_gateway_redis_up", "baton_controller_canary_rollbacks_total"}
_NAME = re.compile(r"\b(?:baton|vllm)[:_][a-zA-Z0-9_:]+")

# promtool's opinion of names that are vLLM's.
_VLLM_LINT = re.compile(r"^(vllm:\w+) ")


@pytest.mark.parametrize("chosen", [{}, {"model": f"({MODEL_NAME}|other)", "revision": "stable"}], ids=["all", "one"])
@pytest.mark.parametrize("path", sorted(DASHBOARDS.glob("*.json")), ids=lambda path: path.stem)
async def test_every_panel_has_data(watched: Watched, path: Path, chosen: dict[str, str]) -> None:
    empty = set()
    for question in Dashboard(path).questions(**chosen):
        series = await watched.prometheus.over(question.expression, watched.begin, watched.end)
        if not any(math.isfinite(float(value)) for one in series for _, value in one["values"]):
            empty.add((path.stem, question.panel))
        labels = set(re.findall(r"\{\{(\w+)\}\}", question.legend))
        assert all(labels <= one["metric"].keys() for one in series), question
    assert empty == {panel for panel in NOTHING_THERE if panel[0] == path.stem}


@pytest.mark.parametrize("path", sorted(DASHBOARDS.glob("*.json")), ids=lambda path: path.stem)
async def test_every_variable_has_values(watched: Watched, path: Path) -> None:
    for name, variable in Dashboard(path).variables.items():
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
            assert match is not None
            metric, label = match.groups()
            found = await watched.prometheus.ask(f"label/{label}/values", **{"match[]": metric})
            assert found, (name, variable["query"])


@pytest.mark.parametrize(
    "name",
    [
        "baton_gateway_time_to_first_token_seconds",
        "baton_gateway_revision_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
    ],
)
async def test_first_tokens_lead_to_traces(watched: Watched, name: str) -> None:
    exemplars = await watched.prometheus.exemplars(f"rate({name}_bucket[1m])", watched.begin, watched.end)
    found = {exemplar["labels"]["trace_id"] for exemplar in exemplars}
    assert found
    async with asyncio.timeout(20):
        while not found <= {span.trace_id.hex() for _, span in watched.collector.spans}:
            await asyncio.sleep(0.1)


async def test_every_rule_asks_for_what_is_there(watched: Watched, rules: list[Path]) -> None:
    names = await watched.prometheus.names()
    for file in rules:
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                await watched.prometheus.now(rule["expr"])
                assert set(_NAME.findall(rule["expr"])) - names <= NOT_HERE, rule
                # A recording is there only if its expression had a result.
                assert rule.get("record", "up") in names, rule


async def test_nothing_is_wrong_yet(watched: Watched) -> None:
    # How fast tokens come is up to this machine, which has other tests to run.
    rest = 'ALERTS{alertstate="firing", alertname!~"Baton(Ttft|Tpot)Burns.*"}'
    assert await watched.prometheus.now(f"max_over_time({rest}[1m])") == []


async def test_dashboards_of_vllm_find_their_names_on_every_pod(watched: Watched) -> None:
    for name in VLLM_NAMES:
        found = await watched.prometheus.now(f'count by (job) ({{__name__="{name}"}})')
        assert {one["metric"]["job"] for one in found} == {"prefill", "decode"}, name


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
async def test_promtool_likes_the_metrics(watched: Watched, promtool: Path, role: str) -> None:
    [address] = watched.stack.metrics_addresses(role)
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://{address}/metrics")).text
    result = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
    )
    # 3: it has found something to say about style.
    assert result.returncode in (0, 3), result.stderr
    complaints = [line for line in result.stderr.splitlines() if line and not _VLLM_LINT.match(line)]
    assert complaints == []


async def test_an_alert_fires_when_the_prefill_pods_die(watched: Watched) -> None:
    firing = 'max_over_time(ALERTS{alertname="BatonNoLivePrefill", alertstate="firing"}[1m])'
    for process in watched.stack.processes("prefill"):
        process.kill()
    await watched.prometheus.until(firing, timeout_s=30)
    [alert] = await watched.prometheus.now(firing)
    assert alert["metric"].items() >= {"model": MODEL_NAME, "pool": "default", "severity": "warning"}.items()
