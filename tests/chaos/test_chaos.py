"""Every request is answered, and answered right, whatever happens to the workers."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.prompts import make_prompt

from .case import Case
from .fleet import Fleet
from .journal import Journal
from .load import BOUND_S, Load
from .plan import Scenario, make_plan

NUM_SCENARIOS = int(os.environ.get("CHAOS_SCENARIOS") or 60)
NUM_CASES = min(2 * NUM_SCENARIOS, 200)
RECORDED_AT_ONCE = 8
NUM_ROUNDS = 80  # a pod that was slow during the faults gets prompts again after some hundred requests
FRESH_TOKENS = 200

pytestmark = pytest.mark.soak


async def record(fleet: Fleet, folder: Path, seed: int, count: int) -> list[Case]:
    """Return so many requests with the answers of the undisturbed fleet, less those that rounding may decide."""
    rng = random.Random(f"{seed}/cases")
    asking = asyncio.Semaphore(RECORDED_AT_ONCE)

    async def recorded(case: Case) -> Case | None:
        async with asking:
            return await case.recorded(fleet.http, folder)

    drawn = await asyncio.gather(*(recorded(Case.draw(number, rng)) for number in range(count)))
    cases = [case for case in drawn if case is not None]
    assert len(cases) > 0.9 * count
    return cases


async def asked_again(fleet: Fleet, cases: Sequence[Case]) -> None:
    """Compare every answer with the one before: nothing wrong has stayed in a prefix cache, and hand-overs succeed."""
    asking = asyncio.Semaphore(RECORDED_AT_ONCE)
    failed = await fleet.failed_handovers()

    async def ask(case: Case) -> None:
        async with asking, asyncio.timeout(BOUND_S):
            answer = await case.ask(fleet.http, stream=False)
        assert case.expected is not None
        assert answer.same_as(case.expected), f"{case}\n{answer}\n{case.expected}"

    await asyncio.gather(*map(ask, cases))
    assert await fleet.failed_handovers() == failed


async def every_prefill_pod_serves(fleet: Fleet) -> None:
    """Send prompts that no cache holds until each prefill pod has handed KV over: all are back in the rotation."""
    wires = {member.name: member.wire for member in fleet.of("prefill") if member.wire is not None}
    passed = {name: wire.num_pieces for name, wire in wires.items()}
    rng = random.Random(0)
    failed = await fleet.failed_handovers()

    for _ in range(NUM_ROUNDS):
        prompts = [make_prompt(FRESH_TOKENS, rng.randrange(1 << 30)) for _ in range(2 * len(wires))]
        fresh = [Case(number, {"prompt": prompt, "max_tokens": 2}) for number, prompt in enumerate(prompts)]
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(case.ask(fleet.http, stream=False) for case in fresh))
        idle = [name for name, wire in wires.items() if wire.num_pieces == passed[name]]
        if not idle:
            break
    assert not idle, f"{idle} had nothing to hand over in {NUM_ROUNDS} rounds"
    assert await fleet.failed_handovers() == failed


async def run_scenarios(fleet: Fleet, load: Load, journal: Journal, plan: Sequence[Scenario]) -> None:
    """Start each scenario at its time, and wait until all are over."""

    async def run(scenario: Scenario) -> None:
        with journal.entry(scenario):
            await scenario.fault.inject(fleet, load)

    async with asyncio.TaskGroup() as group:
        for scenario in plan:
            await asyncio.sleep(scenario.pause_s)
            assert not fleet.problems, f"{fleet.problems} before {scenario}"
            print(scenario, flush=True)
            group.create_task(run(scenario))


async def under_load(load: Load, doing: asyncio.Task[None]) -> None:
    """Keep the load up until something is done; a wrong answer ends both."""
    asking = asyncio.create_task(load.run())
    try:
        await asyncio.wait([asking, doing], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            doing.result()
            load.stop()
        await asking
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        for task in (asking, doing):
            task.cancel()
        await asyncio.gather(asking, doing, return_exceptions=True)


async def nothing_stays(fleet: Fleet) -> None:
    """Wait until every worker is back and holds nothing, and check what the processes have said and left."""
    await fleet.whole()
    await fleet.idle()
    assert not fleet.problems
    errors = fleet.errors()
    assert not errors, "\n".join(errors)
    async with asyncio.timeout(10):
        while fleet.survivors():
            await asyncio.sleep(0.1)


@pytest.mark.timeout(240 + 2 * NUM_SCENARIOS)
async def test_faults(fleet: Fleet, llama: Path, seed: int) -> None:
    journal = Journal()
    cases = await record(fleet, llama, seed, NUM_CASES)
    load = Load(fleet, cases, f"{seed}/load", lambda begun: f"CHAOS_SEED={seed}\n{journal.since(begun)}", clients=8)
    plan = make_plan(seed, NUM_SCENARIOS)
    await under_load(load, asyncio.create_task(run_scenarios(fleet, load, journal, plan)))
    await nothing_stays(fleet)
    await asked_again(fleet, cases)
    await every_prefill_pod_serves(fleet)
    await nothing_stays(fleet)
    hits: Counter[str] = Counter()
    for scenario in plan:
        hits[scenario.fault.name] += scenario.fault.hits
    moved = {name: await fleet.metric(f"{name}_total") for name in ("retries", "resumed_streams")}
    print(f"answers {dict(load.counts)}\nhits {dict(hits)}\ngateway {moved}\nworkers {dict(fleet.events())}")
    if NUM_SCENARIOS >= 200:
        assert all(hits.values()), "a kind of fault has met nothing"
        assert all(moved.values()), "no request has moved to another decode worker"


@pytest.mark.timeout(240)
async def test_rolling_restart(fleet: Fleet, llama: Path, seed: int) -> None:
    """Nobody notices that every worker is replaced, one after another."""
    cases = await record(fleet, llama, seed, 40)
    load = Load(fleet, cases, f"{seed}/load", lambda begun: f"CHAOS_SEED={seed}", clients=4, refusals=False)

    async def restart_all() -> None:
        for member in fleet.members:
            service = member.doom()
            service.send(signal.SIGTERM)
            assert await service.ended() == 0
            await member.serving()
            await fleet.whole()

    await under_load(load, asyncio.create_task(restart_all()))
    assert load.counts["streamed"] + load.counts["whole"] > 100
    await nothing_stays(fleet)
    print(dict(load.counts))
