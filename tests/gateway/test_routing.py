"""Routing through the whole gateway: what pods report decides where requests go."""

import pytest

from baton_common.block_hash import block_keys
from baton_gateway.routing.breaker import FAILURES
from baton_proto import serving_pb2 as pb

from .fake_worker import FakePod, Job, echo, say
from .harness import pods, running

PROMPT = list(range(1, 41))
KEYS = list(block_keys(PROMPT, 4))

pytestmark = pytest.mark.processes


def asked(pod: FakePod) -> list[str]:
    """Return the prefill pod that each request of a decode pod was to be handed to, "" for none."""
    return [next(iter(job.submit.prefill_addresses), "") for job in pod.jobs]


async def test_a_prompt_goes_where_its_blocks_are(model_folder):
    async with (
        pods(block_size=4, num_blocks=1000) as decodes,
        pods(3, pb.ROLE_PREFILL, block_size=4, num_blocks=1000) as prefills,
    ):
        prefills[1].cached = KEYS
        async with running(model_folder, decodes, prefills) as stack:
            for _ in range(3):
                await stack.complete(PROMPT)
            assert asked(decodes[0]) == [prefills[1].address] * 3
            prefills[1].cache_changes.append(pb.CacheChanges(lost=KEYS))
            prefills[2].cache_changes.append(pb.CacheChanges(gained=KEYS))
            index = stack.fleet._index
            await stack.until(lambda: list(index.match(KEYS)) == [3])
            await stack.complete(PROMPT)
            assert asked(decodes[0])[3] == prefills[2].address
            await prefills[2].stop()
            await stack.until(lambda: not index.num_entries)


async def test_short_prompts_stay_on_a_decode_pod_that_knows_its_rate(model_folder):
    async with (
        pods(prefill_rate=1e5) as decodes,
        pods(1, pb.ROLE_PREFILL, prefill_rate=1e5) as prefills,
        running(model_folder, decodes, prefills) as stack,
    ):
        await stack.complete(PROMPT)
        assert asked(decodes[0]) == [""]


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1e4, 5e-324])
async def test_rates_that_no_pod_can_have_are_not_taken(model_folder, rate):
    nan = float("nan")
    async with pods(prefill_rate=rate) as one, pods(prefill_rate=1e5) as other:
        one[0].load = pb.WorkerLoad(prefill_rate=rate, exposed_handover_s=nan, handed_over_tokens=100)
        async with running(model_folder, [*one, *other], queue_timeout_s=1) as stack:
            for _ in range(4):
                response = await stack.complete(PROMPT)
                assert response.status_code == 200, response.text
            assert (await stack.admin("/pods")).status_code == 200


async def test_times_that_are_not_finite_are_not_measured(model_folder):
    async with pods() as decodes, running(model_folder, decodes) as stack:
        info = pb.PromptInfo(queued_seconds=float("nan"), prefill_seconds=-float("inf"))
        decodes[0].script = say([5], prompt=info)
        assert (await stack.complete(PROMPT)).status_code == 200
        assert "NaN" not in (await stack.admin("/metrics")).text


async def test_every_policy_serves(model_folder):
    for policy in ("random", "round_robin", "least_loaded", "kv_aware"):
        async with (
            pods(2) as decodes,
            pods(2, pb.ROLE_PREFILL) as prefills,
            running(model_folder, decodes, prefills, routing_policy=policy) as stack,
        ):
            for _ in range(4):
                assert (await stack.complete(PROMPT)).status_code == 200


async def test_a_session_stays_with_its_pods(model_folder):
    async with (
        pods(3) as decodes,
        pods(3, pb.ROLE_PREFILL) as prefills,
        running(model_folder, decodes, prefills, session_header="x-conversation") as stack,
    ):
        body = {"model": "tiny", "prompt": PROMPT}
        for _ in range(4):
            await stack.http.post("/v1/completions", json=body, headers={"x-conversation": "one"})
        assert sorted(len(pod.jobs) for pod in decodes) == [0, 0, 4]
        [first] = [pod for pod in decodes if pod.jobs]
        assert len(set(asked(first))) == 1
        for _ in range(4):
            await stack.complete(PROMPT, user="two")
        assert sorted(len(pod.jobs) % 4 for pod in decodes) == [0, 0, 0]


async def test_a_prefill_pod_that_does_not_deliver_is_left_out(model_folder, monkeypatch):
    monkeypatch.setattr("baton_gateway.routing.breaker.FIRST_PAUSE_S", 3600.0)  # it is not tried again within the test
    async with (
        pods() as decodes,
        pods(2, pb.ROLE_PREFILL) as prefills,
        running(model_folder, decodes, prefills) as stack,
    ):
        bad = prefills[0].address

        async def script(job: Job) -> None:
            if job.submit.prefill_addresses[0] == bad:
                failed = pb.FailedHandover(handle=job.submit.handle, prefill_address=bad)
                await job.outbox.put(pb.DecodeMessage(step=pb.StepOutput(failed_handovers=[failed])))
            await echo(job)

        stack.pod.script = script
        for _ in range(4 * FAILURES):
            assert (await stack.complete(PROMPT)).status_code == 200
        assert asked(stack.pod).count(bad) == FAILURES
        router = stack.fleet.router
        assert all(not pod.prefill_tokens.charged for pod in (*router.decodes, *router.prefills))
