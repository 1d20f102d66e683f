"""The times at which requests arrive, and the requests that are sent then."""

import csv
import json
import random
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import pytest

from baton_bench.arrivals import gamma_arrivals, step_arrivals
from baton_bench.errors import BenchError
from baton_bench.plan import Plan, Room, make_plans
from baton_bench.settings import BenchSettings
from baton_bench.trace import BLOCK_TOKENS, read_trace

ROOM = Room(max_model_len=8192, highest_token=2000)


def plans(room: Room = ROOM, **settings: Any) -> list[Plan]:
    return make_plans(BenchSettings(**{"seed": 1, **settings}), room)


def prompts(plan: Plan) -> list[list[int]]:
    return [session.turns[0].tokens for session in plan.sessions]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float) -> None:
    dues = list(islice(gamma_arrivals(5.0, burstiness, random.Random(0)), 40_000))
    gaps = [b - a for a, b in pairwise([0.0, *dues])]
    assert fmean(gaps) == pytest.approx(1 / 5, rel=0.03)
    assert pvariance(gaps) / fmean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.08)


def test_steps_have_each_its_rate() -> None:
    dues = list(step_arrivals([(10, 100), (50, 100), (1, 100)], 1.0, random.Random(0)))
    assert dues == sorted(dues)
    counts = [sum(start <= due < start + 100 for due in dues) for start in (0, 100, 200)]
    assert counts == pytest.approx([1000, 5000, 100], rel=0.25)
    assert sum(counts) == len(dues)


def test_the_same_seed_gives_the_same_requests_and_another_others() -> None:
    first, again, other = (plans(seed=seed, input_tokens="10-100", cancel_share=0.3)[0] for seed in (1, 1, 2))
    assert first == again
    assert [session.due for session in first.sessions] != [session.due for session in other.sessions]
    drawn = BenchSettings(), BenchSettings()
    assert drawn[0].seed != drawn[1].seed


def test_loads_share_no_content() -> None:
    """A server would have it cached."""
    slow, fast = plans(rates="1,2", input_tokens=64)
    assert not {tuple(prompt[:16]) for prompt in prompts(slow)} & {tuple(prompt[:16]) for prompt in prompts(fast)}


def test_a_load_ends_after_its_seconds_or_requests() -> None:
    [timed] = plans(rates="20", seconds=10)
    assert 150 < timed.requests < 250
    assert timed.sessions[-1].due < 10
    [counted] = plans(rates="20", requests=7)
    assert counted.requests == 7
    assert counted.seconds == counted.sessions[-1].due


def test_prompts_of_a_load_begin_with_the_shared_prefix() -> None:
    [plan] = plans(rates="2", shared_prefix_tokens=50, input_tokens="5-10", turns=2)
    assert len({tuple(prompt[:50]) for prompt in prompts(plan)}) == 1
    assert len({tuple(prompt[50:]) for prompt in prompts(plan)}) == len(plan.sessions)
    assert all(5 <= len(session.turns[1].tokens) <= 10 for session in plan.sessions)


def test_clients_leave_midway() -> None:
    [plan] = plans(rates="100", cancel_share=0.25, output_tokens=50)
    left = [session.turns[0].cancel_after for session in plan.sessions if session.turns[0].cancel_after]
    assert len(left) / plan.requests == pytest.approx(0.25, rel=0.1)
    assert all(1 <= after < 50 for after in left)


def test_what_is_too_long_is_dropped_or_clipped_and_counted() -> None:
    room = Room(100, 2000)
    lengths = {"input_tokens": "40-90", "output_tokens": "20-20", "rates": "5"}
    [fitting], [dropping], [clipping] = (
        plans(**lengths),
        plans(room, **lengths),
        plans(room, too_long="clip", **lengths),
    )
    too_long = [prompt for prompt in prompts(fitting) if len(prompt) > 80]
    assert dropping.dropped == clipping.clipped == len(too_long) > 0
    assert dropping.requests == fitting.requests - len(too_long)
    assert prompts(clipping) == [prompt[:80] for prompt in prompts(fitting)]
    [unfit] = plans(Room(10, 2000), too_long="clip", **lengths)
    assert {(len(s.turns[0].tokens), s.turns[0].outputs) for s in unfit.sessions} == {(1, 9)}
    assert not plans(Room(10, 2000), **lengths)[0].sessions


def test_a_conversation_ends_where_the_model_does() -> None:
    [plan] = plans(Room(100, 2000), input_tokens=20, output_tokens=20, turns=4, rates="1")
    assert {len(session.turns) for session in plan.sessions} == {2}
    assert plan.dropped == 2 * len(plan.sessions)


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    rows = [
        (1000, 1500, 30, [0, 1, 2]),
        (3000, 1536, 0, [0, 1, 5]),
        (2000, 700, 4, [0, 4]),
        (9000, 600, 9, [9, 2]),
    ]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_mooncake_prompts_share_what_their_hash_ids_say(mooncake: Path, scale: float) -> None:
    rows = read_trace(mooncake)
    [plan] = plans(trace=mooncake, length_scale=scale)
    size = round(BLOCK_TOKENS * scale)
    blocks = [
        (block, tuple(prompt[i * size : (i + 1) * size]))
        for row, prompt in zip(rows, prompts(plan), strict=True)
        for i, block in enumerate(row.blocks or ())
    ]
    for one, content in blocks:
        for other, others in blocks:
            least = min(len(content), len(others))  # the last block of a prompt is not whole
            assert (one == other) == (content[:least] == others[:least])
    assert [len(prompt) for prompt in prompts(plan)] == [round(row.inputs * size / BLOCK_TOKENS) for row in rows]


def test_a_trace_keeps_its_times_and_lengths(mooncake: Path, tmp_path: Path) -> None:
    once, twice = plans(trace=mooncake, speeds="1,2")
    assert [session.due for session in once.sessions] == [0, 1, 2, 8]
    assert [session.due for session in twice.sessions] == [0, 0.5, 1, 4]
    assert [session.turns[0].outputs for session in once.sessions] == [30, 4, 1, 9]
    assert twice.rate == 2 * once.rate == 4 / 4
    assert len(plans(trace=mooncake, seconds=5)[0].sessions) == 3

    azure = tmp_path / "azure.csv"
    with azure.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        lines.writerow(["2023-11-16 18:15:46.6805900", 374, 44])
        lines.writerow(["2023-11-16 18:16:01.1805900", 96, 109])
    [plan] = plans(trace=azure, length_scale=0.5)
    assert [(s.due, len(s.turns[0].tokens), s.turns[0].outputs) for s in plan.sessions] == [
        (0, 187, 22),
        (pytest.approx(14.5), 48, 54),
    ]


@pytest.mark.parametrize(
    "text", ["", "no json", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}']
)
def test_a_bad_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"bad\.jsonl"):
        plans(trace=path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"input_tokens": "5-3"}, "input_tokens"),
        ({"rates": "1,0"}, "rates"),
        ({"steps": "5"}, "steps"),
        ({"steps": "5:0"}, "steps"),
        ({"target": "a=http://x,a=http://y"}, "--target"),
        ({"admin_url": "b=http://x"}, "--admin-url"),
        ({"trace": "t", "turns": 2}, "--trace"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BenchSettings(**settings)
