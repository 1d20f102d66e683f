"""Tasks that run as long as the gateway does: started again when they fail, and counted."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from baton_gateway.concurrency.background import keep_running, stop_running
from baton_gateway.tenancy.keys import make_key
from baton_gateway.tenancy.tenants import Tenants
from tests.gateway.harness import error_of, pods, running
from tests.gateway.test_observability import metrics

from .conftest import RedisServer


async def test_a_task_that_fails_is_run_again_after_longer_and_longer_pauses(caplog: pytest.LogCaptureFixture) -> None:
    times: list[float] = []

    async def run() -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) % 2:
            raise ValueError("a prompt of somebody")

    task = keep_running("test", run)
    async with asyncio.timeout(5):
        while len(times) < 4:
            await asyncio.sleep(0.01)
    await stop_running(task)
    assert task.cancelled()
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(pause >= 0.95 * least for pause, least in zip(pauses, [0.1, 0.2, 0.4], strict=False))
    assert {getattr(record, "task", None) for record in caplog.records} == {"test"}
    assert "somebody" not in str([vars(record) for record in caplog.records])


async def test_a_task_that_loses_a_cancellation_is_stopped() -> None:
    lost = 0

    async def run() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost:
                    raise
                lost += 1

    task = keep_running("test", run)
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await stop_running(task)
    assert task.cancelled()
    assert lost == 1


@pytest.mark.processes
async def test_revocation_is_followed_after_a_failure_and_the_failure_is_counted(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {}")
    reload, failed = Tenants._reload, False

    async def fail_once(self: Tenants, path: Path) -> None:
        nonlocal failed
        if not failed:
            failed = True
            raise KeyError("unforeseen")
        await reload(self, path)

    monkeypatch.setattr(Tenants, "_reload", fail_once)
    name = "baton_gateway_background_task_failures_total"
    async with pods() as decodes, running(model_folder, decodes, tenants_file=file) as stack:
        await stack.until(lambda: failed)
        await asyncio.to_thread(file.write_text, "tenants: {late: {}}")
        await stack.until(lambda: "late" in stack.gateway.tenants.known)
        seen = await metrics(stack)
        assert seen[name, (("task", "tenants"),)] >= 1
        # The others are there from the start.
        assert {labels for metric, labels in seen if metric == name} >= {
            (("task", task),) for task in ("limits", "tenants", "pod reports", "decode stream", "queue")
        }
        assert seen["baton_gateway_keys_age_seconds", ()] < 2


async def test_a_gateway_that_has_not_read_the_keys_yet_is_not_ready(
    tmp_path: Path, model_folder: Path, redis_server: RedisServer
) -> None:
    file, text = tmp_path / "tenants.yaml", make_key("a")[0]
    file.write_text("tenants: {a: {}}")
    lost = f"unix://{tmp_path}/nothing.sock"
    settings: dict[str, Any] = {"tenants_file": file, "api_keys": ["sk-static"]}
    async with pods() as decodes, running(model_folder, decodes, redis_url=lost, **settings) as stack:

        async def status(key: str) -> Any:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return await stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=headers)

        for probe in (stack.http.get("/ready"), stack.admin("/ready")):
            assert (await probe).status_code == 503
        refused = await status(text)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "server_is_overloaded")
        assert refused.headers["retry-after"] == "1"
        assert (await status("")).status_code == 401
        assert (await status("sk-static")).status_code == 200
        # Redis comes up.
        (tmp_path / "nothing.sock").symlink_to(redis_server.url.removeprefix("unix://"))
        await stack.until(lambda: stack.gateway.services.ready)
        assert (await status(text)).status_code == 401
        assert (await stack.http.get("/ready")).status_code == 200


@pytest.mark.parametrize(("redis_lost", "ready"), [("local", True), ("refuse", False)])
async def test_a_gateway_that_loses_redis_stays_ready_unless_it_refuses_requests(
    tmp_path: Path, model_folder: Path, redis_server: RedisServer, redis_lost: str, ready: bool
) -> None:
    link = tmp_path / "redis.sock"
    link.symlink_to(redis_server.url.removeprefix("unix://"))
    settings: dict[str, Any] = {"redis_url": f"unix://{link}", "redis_lost": redis_lost}
    async with pods() as decodes, running(model_folder, decodes, **settings) as stack:
        await stack.until(lambda: stack.gateway.services.ready)
        assert stack.gateway.tenants._redis_keys is not None
        link.unlink()
        await stack.gateway.tenants._redis_keys._redis.connection_pool.disconnect()
        await stack.until(lambda: not stack.gateway.tenants.redis_up)
        assert stack.gateway.services.ready == ready
        await asyncio.sleep(1)
        assert (await metrics(stack))["baton_gateway_keys_age_seconds", ()] > 0.9
