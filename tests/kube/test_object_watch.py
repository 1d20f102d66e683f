"""The copy of the cluster's objects stays current through all failures of the API server."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from kubernetes import client

from baton_kube.object_watch import Objects, ObjectWatch

from .api_server import ApiServer


class Seen:
    """The objects of the last callback, and the number of callbacks."""

    def __init__(self) -> None:
        self.objects: Objects = {}
        self.times = 0
        self._news = asyncio.Condition()

    def take(self, objects: Objects) -> None:
        self.objects = objects
        self.times += 1

    async def until(self, **data: str) -> None:
        async with asyncio.timeout(10):
            while {name: found.data["value"] for name, found in self.objects.items()} != data:
                await asyncio.sleep(0.01)


@pytest.fixture
def api(processes: None) -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest_asyncio.fixture
async def seen(api: ApiServer) -> AsyncIterator[Seen]:
    seen = Seen()
    maps = client.CoreV1Api(api.client()).list_namespaced_config_map
    watch = ObjectWatch("maps", maps, seen.take, namespace="default", label_selector="app=it")
    api.put("configmaps", "a", {"app": "it"}, data={"value": "1"})
    api.put("configmaps", "other", {"app": "another"}, data={"value": "1"})
    watch.start()
    await seen.until(a="1")
    yield seen
    watch.stop()


def put(api: ApiServer, name: str, value: str) -> None:
    api.put("configmaps", name, {"app": "it"}, data={"value": value})


async def test_changes_are_seen(api: ApiServer, seen: Seen) -> None:
    put(api, "b", "2")
    await seen.until(a="1", b="2")
    put(api, "a", "3")
    await seen.until(a="3", b="2")
    api.remove("configmaps", "b")
    await seen.until(a="3")
    assert api.requests == {("list", "configmaps"), ("watch", "configmaps")}


async def test_a_watch_that_ends_goes_on_where_it_was(api: ApiServer, seen: Seen) -> None:
    told = seen.times
    api.cut()
    put(api, "b", "2")
    await seen.until(a="1", b="2")
    assert seen.times == told + 1


async def test_forgotten_events_are_made_up_for_by_a_list(api: ApiServer, seen: Seen) -> None:
    api.down = True
    api.cut()
    put(api, "a", "2")
    api.remove("configmaps", "a")
    put(api, "b", "3")
    api.compact()
    api.down = False
    await seen.until(b="3")


async def test_what_was_known_stays_while_the_server_is_away(
    api: ApiServer, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    api.down = True
    api.cut()
    put(api, "b", "2")
    await asyncio.sleep(1)
    await seen.until(a="1")
    api.down = False
    await seen.until(a="1", b="2")
    events = [getattr(record, "event", None) for record in caplog.records]
    assert [event for event in events if event] == ["kubernetes_lost", "kubernetes_back"]


async def test_an_unforeseen_error_ends_nothing_and_is_told(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[None] = []
    seen, relist = Seen(), ObjectWatch._relist

    def fail_once(self: ObjectWatch, loop: asyncio.AbstractEventLoop) -> None:
        if not failures:
            raise KeyError("unforeseen")
        relist(self, loop)

    monkeypatch.setattr(ObjectWatch, "_relist", fail_once)
    maps = client.CoreV1Api(api.client()).list_namespaced_config_map
    watch = ObjectWatch("maps", maps, seen.take, lambda: failures.append(None), namespace="default")
    put(api, "a", "1")
    watch.start()
    await seen.until(a="1")
    put(api, "b", "2")
    await seen.until(a="1", b="2")
    watch.stop()
    assert len(failures) == 1
