"""A share of the sessions, or copies of requests, goes to another revision."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from baton_gateway.routing.canary import CanaryError, CanaryShare, parse_canaries
from baton_gateway.routing.demand import Demand
from baton_gateway.routing.kv_aware import KvAware
from baton_gateway.routing.policies import LeastLoaded
from baton_gateway.routing.prefix_index import PrefixIndex
from baton_gateway.routing.router import Router
from baton_proto import serving_pb2 as pb

from .fake_worker import failing, hang
from .harness import Stack, pods, running
from .test_observability import metrics
from .test_router import Clock, pod

SESSIONS = [f"session {number}" for number in range(2_000)]


def trial(weight: float, shadow: bool = False, live: tuple[str, ...] = ("r1", "r2")) -> Router:
    decodes = [pod(f"d{revision}", revision=revision, fingerprint=revision) for revision in live]
    prefills = [pod(f"p{revision}", revision=revision) for revision in live]
    router = Router(decodes, prefills, KvAware(PrefixIndex(), local_prefill=False), Clock())
    router.canary = CanaryShare("r2", weight, shadow)
    return router


def chosen(router: Router, session: str, **options: str) -> str:
    route = router.dispatch(Demand.of([1, 2, 3], 10, session), **options)
    assert route is not None
    revisions = {route.decode.revision, *(prefill.revision for prefill in route.prefills)}
    [revision] = revisions
    return revision


@pytest.mark.parametrize("weight", [0, 1, 20, 50, 100])
def test_sessions_are_shared_by_weight_and_stay(weight):
    router = trial(weight)
    first = [chosen(router, session) for session in SESSIONS]
    assert Counter(first)["r2"] / len(SESSIONS) == pytest.approx(weight / 100, abs=0.03)
    assert [chosen(router, session) for session in SESSIONS] == first


def test_a_session_stays_with_the_canary_while_its_weight_grows():
    router = trial(10)
    taken = {session for session in SESSIONS if chosen(router, session) == "r2"}
    router.canary = CanaryShare("r2", 40)
    assert taken < {session for session in SESSIONS if chosen(router, session) == "r2"}


def test_requests_without_a_session_are_shared_too():
    router = trial(30)
    share = Counter(chosen(router, "") for _ in SESSIONS)["r2"] / len(SESSIONS)
    assert share == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(
    ("weight", "shadow", "live", "served_by"),
    [
        (30, False, ("r1",), {"r1"}),
        (30, False, ("r2",), {"r2"}),
        (0, False, ("r2",), {None}),  # what has no share stands in for nobody
        (50, True, ("r2",), {None}),
        (50, True, ("r1", "r2"), {"r1"}),
    ],
)
def test_one_stands_in_for_the_other_when_it_has_a_share(weight, shadow, live, served_by):
    router = trial(weight, shadow, live)
    routes = [router.dispatch(Demand.of([1], 5, session)) for session in SESSIONS[:50]]
    assert {route and route.decode.revision for route in routes} == served_by


def test_a_stream_goes_on_where_the_same_weights_are():
    router = trial(0)
    assert chosen(router, "any", fingerprint="r2") == "r2"


def test_without_a_canary_all_revisions_are_equal():
    router = trial(0)
    router.canary = None
    assert {chosen(router, session) for session in SESSIONS[:50]} == {"r1", "r2"}


def test_copies_go_to_the_canary_alone():
    router = trial(25, shadow=True)
    copied = [router.shadow(Demand.of([1], 5, session)) for session in SESSIONS]
    assert {route.decode.revision for route in copied if route} == {"r2"}
    assert sum(route is not None for route in copied) / len(SESSIONS) == pytest.approx(0.25, abs=0.03)
    assert trial(25).shadow(Demand(1)) is None
    assert Router([pod("a")], [], LeastLoaded(), Clock()).shadow(Demand(1)) is None


@pytest.mark.parametrize("text", ["", "[]", '{"m": {"weight": 1}}', '{"m": {"revision": "r", "weight": 101}}'])
def test_what_makes_no_sense(text):
    with pytest.raises(CanaryError):
        parse_canaries(text)


@pytest.mark.processes
async def test_a_file_says_it(tmp_path: Path, model_folder: Path) -> None:
    file = tmp_path / "canary.json"
    file.write_text(json.dumps({"tiny": {"revision": "r2", "weight": 100}}))
    async with (
        pods() as (old,),
        pods(revision="r2") as (new,),
        running(model_folder, [old, new], canary_file=file) as stack,
    ):
        await stack.complete()
        assert (len(old.jobs), len(new.jobs)) == (0, 1)
        file.write_text("{")
        await asyncio.sleep(1.2)
        await stack.complete()
        assert (len(old.jobs), len(new.jobs)) == (0, 2)
        file.write_text("{}")
        router = stack.fleet.router
        await stack.until(lambda: router.canary is None)


async def counts(stack: Stack) -> dict[tuple[str, str], float]:
    prefix = "baton_gateway_revision_requests_total"
    found = [(dict(labels), value) for (name, labels), value in (await metrics(stack)).items() if name == prefix]
    return {(labels["revision"], labels["outcome"]): value for labels, value in found}


@pytest.mark.processes
async def test_what_each_revision_does_is_counted(model_folder: Path) -> None:
    async with pods() as (old,), pods(revision="r2") as (new,), running(model_folder, [old, new]) as stack:
        stack.fleet.router.canary = CanaryShare("r2", 100)
        new.script = failing(pb.Failure.CODE_UNAVAILABLE)
        answer = await stack.complete("lazy dog")
        assert answer.status_code == 200
        assert await counts(stack) == {("r2", "error"): 1, ("r1", "ok"): 1}
        labels = (("model", "tiny"), ("revision", "r1"))
        seen = await metrics(stack)
        for name in ("time_to_first_token", "time_per_output_token"):
            assert seen[f"baton_gateway_revision_{name}_seconds_count", labels] == 1


@pytest.mark.processes
async def test_copies_are_counted_and_nobody_hears_of_them(model_folder: Path) -> None:
    async with pods() as (old,), pods(revision="r2") as (new,), running(model_folder, [old, new]) as stack:
        stack.fleet.router.canary = CanaryShare("r2", 100, shadow=True)
        plain = (await stack.complete("lazy dog", n=2)).json()
        assert len(plain["choices"]) == 2
        [original], [copy] = old.jobs, new.jobs
        assert copy.prompt == original.prompt
        assert copy.submit.sampling == original.submit.sampling
        new.script = failing(pb.Failure.CODE_INTERNAL)
        assert (await stack.complete("lazy dog")).status_code == 200
        new.script = failing(pb.Failure.CODE_INVALID)
        assert (await stack.complete("lazy dog")).status_code == 200
        await stack.until(lambda: not stack.fleet._shadows)
        assert await counts(stack) == {("r1", "ok"): 3, ("r2", "ok"): 2, ("r2", "error"): 1}
        new.script = hang(5)
        assert (await stack.complete("lazy dog")).status_code == 200
        await new.stop()
        await stack.until(lambda: not stack.fleet._shadows)
        assert (await counts(stack))["r2", "error"] == 2
        pod = stack.fleet.router.decodes[1]
        assert (pod.requests.charged, pod.prefill_tokens.charged) == (0, 0)
