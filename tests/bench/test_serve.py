"""`baton bench serve` against real HTTP: a gateway with a scripted pod, and a server that knows only OpenAI's API."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from baton_bench.errors import BenchError
from baton_bench.html_report import html_report
from baton_bench.main import measure
from baton_bench.plan import Room, make_plans
from baton_bench.report import Report
from baton_bench.settings import BenchSettings
from baton_bench.table import notes
from baton_bench.target import find_target
from tests.gateway.harness import Stack

from .canned_server import CannedServer
from .conftest import LOOP

pytestmark = pytest.mark.asyncio(loop_scope=LOOP)

SMALL: dict[str, Any] = {"seed": 1, "warmup": 0, "rates": "30", "seconds": 0.5, "input_tokens": 20, "output_tokens": 5}


async def measured(**settings: Any) -> Report:
    report = Report(BenchSettings(**{**SMALL, **settings}))
    await measure(report, lambda line: None)
    return report


async def test_the_command_measures_writes_and_prints(gateway: Stack, tmp_path: Path) -> None:
    """Two names for one gateway, at two rates."""
    table, page = tmp_path / "new" / "out.json", tmp_path / "out.html"
    command = [sys.executable, "-m", "baton_cli", "bench", "serve", "--json-file", str(table), "--html-file", str(page)]
    for name in ("one", "two"):
        command += ["--target", f"{name}={gateway.url}/v1"]
        command += ["--admin-url", f"{name}=http://127.0.0.1:{gateway.admin_port}"]
    command += ["--rates", "10,20", "--seconds", "1.5", "--input-tokens", "10-40", "--output-tokens", "2-9"]
    command += ["--ttft-slo-ms", "5000", "--tpot-slo-ms", "2000", "--api-key", "sk-secret", "--seed", "4"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    found = json.loads(table.read_text())
    assert [(row["target"], row["load"]) for row in found["results"]] == [
        (target, load) for target in ("one", "two") for load in ("10/s", "20/s")
    ]
    for row in found["results"]:
        assert row["failed"] == row["prompts_of_other_length"] == 0
        assert row["goodput_req_s"] == pytest.approx(row["offered_req_s"])
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["max"]
        assert row["pods"][-1]["kv"] == {"decode": 0.25}
        line = next(line for line in stdout.decode().splitlines() if line.split()[:2] == [row["target"], row["load"]])
        assert str(row["completed"]) in line.split()
    # What was sent is what the server counted, and the same for both.
    sent = [[request["inputs"] for request in row["requests_sent"]] for row in found["results"]]
    assert sent[:2] == sent[2:]
    assert sent == [[request["prompt_tokens"] for request in row["requests_sent"]] for row in found["results"]]
    assert all(r["tokens"] == r["asked"] for row in found["results"] for r in row["requests_sent"])
    assert found["parameters"]["rates"] == [10, 20]
    assert found["targets"][0]["itl_by"] == "token"
    assert "sk-secret" not in table.read_text() + page.read_text() + stdout.decode() + stderr.decode()
    check_page(page.read_text(), loads=2, targets=2)


def check_page(page: str, loads: int, targets: int) -> None:
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    tags = {element.tag for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "use", "image"}
    assert not {name for element in root.iter() for name in element.attrib} & {"src", "href", "srcset", "data"}
    assert not re.search(r"@import|url\(", page)
    figures = [figure.get("class") for figure in root.iter("figure")]
    each = ["ttft-cdf", "itl-cdf", "e2e-cdf", "in-flight", "queue", "batch", "kv kv-decode"]
    assert figures == ["goodput", "throughput", *each * loads]
    for figure in root.iter("figure"):
        lines = list(figure.iter("polyline"))
        assert len(lines) == targets
        for line in lines:
            points = [tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()]
            assert points
            assert all(0 <= x <= 460 and 0 <= y <= 270 for x, y in points)


async def test_prompts_reach_the_pod_as_planned(gateway: Stack) -> None:
    report = await measured(target=gateway.url, warmup=1, shared_prefix_tokens=7)
    [target] = report.targets
    [plan] = make_plans(report.settings, Room(target.max_model_len, target.highest_token or 0))
    planned = [session.turns[0].tokens for session in plan.sessions]
    assert target.max_model_len == 512
    assert [job.prompt for job in gateway.pod.jobs[-len(planned) :]] == planned
    assert not any(job.prompt in planned for job in gateway.pod.jobs[: -len(planned)])


async def test_a_conversation_goes_on_with_its_answers(gateway: Stack) -> None:
    report = await measured(target=gateway.url, turns=3, think_s=0.01, requests=2)
    answers = report.results[0].answers
    assert len(answers) == 6
    jobs = {len(job.prompt): job for job in gateway.pod.jobs if len(job.prompt) >= 20}
    assert sorted(jobs) == [20, 45, 70]
    said = [300 + i for i in range(5)]
    assert jobs[45].prompt[:25] in [session.turns[0].tokens + said for session in report.results[0].plan.sessions]
    assert jobs[70].prompt[45:50] == said
    for answer in answers:
        assert answer.prompt_tokens == answer.inputs == 20 + 25 * answer.turn
        previous = [other for other in answers if (other.session, other.turn) == (answer.session, answer.turn - 1)]
        assert all(answer.due == pytest.approx(other.end + 0.01) for other in previous)


async def test_sessions_have_a_header(canned: CannedServer) -> None:
    await measured(target=canned.url, turns=2, think_s=0, requests=2, prompt_as="text")
    sessions = [headers["x-session-id"] for headers in canned.headers if "x-session-id" in headers]
    assert sorted(sessions.count(session) for session in set(sessions)) == [2, 2]
    later = [body["prompt"] for body in canned.bodies if len(body["prompt"].split()) > 20]
    assert all(prompt.split()[20:25] == ["a"] * 5 for prompt in later)
    assert len(later) == 2


async def test_clients_that_leave_stop_the_pod(gateway: Stack) -> None:
    async def never_ending(job: Any) -> None:
        for _ in range(job.submit.sampling.max_tokens - (job.submit.sampling.max_tokens > 10)):
            await job.send(job.delta([300]))
            await asyncio.sleep(0.001)
        await (asyncio.Event().wait() if job.submit.sampling.max_tokens > 10 else job.send(job.delta(finish=2)))

    gateway.pod.script = never_ending
    report = await measured(target=gateway.url, cancel_share=1, output_tokens=20)
    answers = report.results[0].answers
    assert {answer.outcome for answer in answers} == {"cancelled"}
    assert all(0 < answer.tokens < 20 for answer in answers)
    await gateway.until(lambda: len(gateway.pod.cancels) == len(answers))
    assert report.good


async def test_a_plain_server_gets_text_and_what_it_knows(canned: CannedServer) -> None:
    canned.plain = True
    report = await measured(target=canned.url)
    [target] = report.targets
    assert (target.dialect.form, target.dialect.exact, target.by_token) == ("text", False, False)
    assert {len(body["prompt"].split()) for body in canned.bodies[-5:]} == {20}
    assert len(list(notes(report))) == 5
    # A busy machine makes the tokens late, never early.
    assert canned.interval_s * 1e3 * 0.5 <= report.summaries[0]["tpot_ms"]["p50"] <= canned.interval_s * 1e3 * 10


async def test_the_time_between_tokens_is_the_servers(canned: CannedServer) -> None:
    canned.interval_s = 0.05
    report = await measured(target=canned.url, output_tokens=10)
    summary = report.summaries[0]
    assert 40 <= summary["itl_ms"]["p50"] <= 150
    assert summary["output_tok_s"] > 0


@pytest.mark.parametrize(("status", "broken", "error"), [(503, False, "status 503"), (200, True, "broken connection")])
async def test_errors_are_counted_by_kind(canned: CannedServer, status: int, broken: bool, error: str) -> None:
    report = Report(BenchSettings(**{**SMALL, "target": canned.url}))

    def fail_from_now_on(line: str) -> None:
        canned.status, canned.broken = status, broken

    await measure(report, fail_from_now_on)
    summary = report.summaries[0]
    assert summary["errors"] == {error: summary["requests"]}
    assert summary["failed"] == summary["requests"] > 0
    assert not report.good
    assert any("failed: " in note for note in notes(report))
    assert html_report(report)


async def test_a_server_that_is_not_there_is_named(canned: CannedServer) -> None:
    settings = BenchSettings(model="m")
    with pytest.raises(BenchError, match=r"nobody: http://127\.0\.0\.1:1: no connection"):
        await find_target("nobody", "http://127.0.0.1:1", settings)
    with pytest.raises(BenchError, match="is no URL"):
        await find_target("nobody", "127.0.0.1:1", settings)
    canned.status = 500
    with pytest.raises(BenchError, match="answers nothing that was tried"):
        await find_target("canned", canned.url, settings)
    canned.status = 200
    with pytest.raises(BenchError, match="--admin-url"):
        await measured(target=f"a={canned.url}", admin_url="a=http://127.0.0.1:1")
