"""The device's sampler gives the host's tokens and logprobs, even if the host has not read the newest token yet."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from baton_engine.block_tables import BlockTable
from baton_engine.draw_groups import RowDraw
from baton_engine.results import Choice
from baton_engine.row_table import DeviceRowTable
from baton_engine.sampler import Draw, sample, token_logprobs
from baton_engine.sampling import Grammar, GrammarKind, SamplingParams
from baton_engine.sequence import Request, Sequence
from baton_engine.step import new_rows
from baton_engine.step_plan import StepPlan

from .test_sampler import EDITS, FILTERS, OUTPUT, PROMPT, VOCAB_SIZE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_LEN = 64
SEEDS = int(os.environ.get("SAMPLER_SEEDS") or 1)


@pytest.fixture(autouse=True)
def _one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows into a single part: the interpreter spends time on every part, and tokens do not depend on parts."""
    import baton_engine.device_sampler

    def draw(*arguments: torch.Tensor) -> torch.Tensor:
        return gumbel_argmax(*arguments, parts=1 if DEVICE.type == "cpu" else None)

    gumbel_argmax = baton_engine.device_sampler.gumbel_argmax
    monkeypatch.setattr(baton_engine.device_sampler, "gumbel_argmax", draw)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail when the host waits for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


class World:
    """A device sampler over a row table, with the host's sampler to check its tokens.

    The table learns all tokens of a sequence when the sequence is new in its row, and none later.
    """

    def __init__(self, rows: int, vocab: int = VOCAB_SIZE) -> None:
        from baton_engine.device_sampler import DeviceSampler

        self.table = DeviceRowTable(rows, MAX_LEN, 16, 1, DEVICE)
        self.sampler = DeviceSampler(self.table, vocab, DEVICE)
        self.vocab = vocab
        self.order = torch.randperm(rows + 8).tolist()
        self.owners: list[Sequence | None] = [None] * rows

    def begin(self, draws: list[tuple[Sequence, list[int], int]]) -> None:
        """Begin the rows of new sequences in the table."""
        new = {sequence.row: sequence for sequence, _, _ in draws if self.owners[sequence.row] is not sequence}
        for sequence, tokens, _ in draws:
            assert tokens[: sequence.prompt_len] == sequence.prompt
            sequence.output = tokens[sequence.prompt_len :]
            sequence.known = len(tokens)
            sequence.tables = [BlockTable([])]
        self.table.take(StepPlan(new_rows=new_rows(list(new.values()))))
        for row, sequence in new.items():
            self.owners[row] = sequence

    def check(self, draws: list[tuple[Sequence, list[int], int]], logits: torch.Tensor | None = None) -> list[int]:
        """Draw for (sequence, all its tokens, choice), compare with the host's sampler and return the tokens."""
        if logits is None:
            logits = torch.randn(len(draws), self.vocab) * 2
        # The rows are out of order, between rows of NaN that must not be read.
        places = torch.tensor(self.order[: len(draws)])
        spread = torch.full((len(self.order), self.vocab), float("nan"), dtype=logits.dtype)
        spread[places] = logits
        inputs = torch.full((len(self.order),), self.vocab - 1)
        inputs[places] = torch.tensor([tokens[-1] for _, tokens, _ in draws])
        self.begin(draws)
        wanted = [
            RowDraw(sequence.row, len(tokens), choice, row, index, sequence.row)
            for index, ((sequence, tokens, choice), row) in enumerate(zip(draws, places.tolist(), strict=True))
        ]
        spread, inputs = spread.to(DEVICE), inputs.to(DEVICE)
        before, got = spread.clone(), torch.full((len(draws),), -7, device=DEVICE)
        with no_waiting():
            drawn = self.sampler.draw(spread, inputs, got, wanted)
        assert torch.equal(spread.nan_to_num(), before.nan_to_num())
        logprobs = [] if drawn.logprobs is None else drawn.logprobs.tolist()
        choices = drawn.choices(got.tolist(), logprobs)
        assert_equal(choices, logits.float(), draws)
        last = {sequence.row: choice.token for (sequence, _, _), choice in zip(draws, choices, strict=True)}
        if len(last) == len(draws):
            assert self.table.last_tokens[list(last)].tolist() == list(last.values())
        return [choice.token for choice in choices]


def assert_equal(choices: list[Choice], logits: torch.Tensor, draws: list[tuple[Sequence, list[int], int]]) -> None:
    expected = sample(
        logits,
        [
            Draw(s.sampling, tokens[: s.prompt_len], tokens[s.prompt_len :], row, choice)
            for row, (s, tokens, choice) in enumerate(draws)
        ],
    )
    assert [choice.token for choice in choices] == expected
    for row, (choice, (sequence, _, _)) in enumerate(zip(choices, draws, strict=True)):
        count = sequence.sampling.logprobs
        if count is None:
            assert choice.logprobs is None
            continue
        [entry] = token_logprobs(logits[row : row + 1], [choice.token], [count])
        ours = choice.logprobs
        assert ours is not None
        assert (ours.token_id, ours.rank, ours.top_token_ids) == (entry.token_id, entry.rank, entry.top_token_ids)
        assert [ours.logprob, *ours.top_logprobs] == pytest.approx([entry.logprob, *entry.top_logprobs], abs=1e-5)


def make_sequence(row: int, prompt: list[int] = PROMPT, **fields: Any) -> Sequence:
    sequence = Sequence(Request(id=row, prompt=prompt, sampling=SamplingParams(**fields)), row, 16, MAX_LEN)
    sequence.row = row
    return sequence


def random_fields(source: random.Random, vocab: int) -> dict[str, Any]:
    """Return parameters, each set with some probability. Most outputs consist of tokens below 6."""

    def some(value: Any, off: Any, chance: float = 0.3) -> Any:
        return value if source.random() < chance else off

    def tokens(count: int) -> list[int]:
        return [source.choice([source.randrange(6), source.randrange(vocab)]) for _ in range(count)]

    def likely(count: int) -> list[int]:
        return [source.randrange(6) for _ in range(count)]

    return {
        "temperature": some(source.choice([0.3, 1.0, 2.0]), 0.0, 0.8),
        "seed": source.getrandbits(64),
        "top_k": some(source.choice([1, 3, 10, 1000]), 0),
        "top_p": some(source.uniform(0.1, 1), 1.0),
        "min_p": some(source.uniform(0, 0.5), 0.0),
        "presence_penalty": some(source.uniform(-2, 2), 0.0),
        "frequency_penalty": some(source.uniform(-2, 2), 0.0),
        "repetition_penalty": some(source.uniform(0.5, 2), 1.0),
        "logit_bias": some({token: source.uniform(-5, 5) for token in tokens(4)}, {}),
        "allowed_token_ids": some(tokens(5), [], 0.15),
        "bad_words": some([likely(source.choice([1, 2, 2, 3, 4])) for _ in range(8)], []),
        "min_tokens": some(source.randrange(1, 8), 0),
        "max_tokens": 40,
        "stop_token_ids": some(likely(1), []),
        "eos_token_ids": [1, vocab + 5],
        "logprobs": some(source.choice([0, 1, 5, vocab + 3]), None),
    }


@pytest.mark.parametrize("name", EDITS)
def test_edits(name: str) -> None:
    world = World(4)
    rows = [make_sequence(row, temperature=[0.0, 1.0][row % 2], seed=row, **EDITS[name]) for row in range(4)]
    world.check([(sequence, [*PROMPT, *OUTPUT], 0) for sequence in rows])


@pytest.mark.parametrize("name", FILTERS)
def test_filters(name: str) -> None:
    world = World(6)
    rows = [make_sequence(row, temperature=0.4 * (row + 1), seed=row, **FILTERS[name]) for row in range(6)]
    world.check([(sequence, [*PROMPT, *OUTPUT], 0) for sequence in rows])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SEEDS))
def test_many_steps_with_tokens_under_way(seed: int) -> None:
    """Sequences of all kinds begin, are preempted, skip steps and end, while the host is one token behind."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    rows, vocab = 8, 101
    world = World(rows, vocab)
    running: dict[Sequence, list[int]] = {}

    def start(row: int) -> None:
        prompt = [source.randrange(6) for _ in range(source.randrange(1, 12))]
        sequence = make_sequence(row, prompt, **random_fields(source, vocab))
        running[sequence] = list(prompt)

    for row in range(rows):
        start(row)
    for _ in range(20):
        for sequence in list(running):
            if source.random() < 0.08:
                del running[sequence]
                start(sequence.row)
        if source.random() < 0.3:
            # Both are preempted and return in each other's rows.
            one, other = source.sample(list(running), 2)
            one.row, other.row = other.row, one.row
        now = [sequence for sequence in running if source.random() < 0.9]
        source.shuffle(now)
        logits = torch.randn(len(now), vocab)
        logits[:, :6] += 4
        tokens = world.check([(sequence, running[sequence], sequence.sampling.seed % 3) for sequence in now], logits)
        for sequence, token in zip(now, tokens, strict=True):
            running[sequence].append(token)


def test_a_bad_word_is_found_across_tokens_that_the_host_has_not_read() -> None:
    world = World(1)
    sequence = make_sequence(0, bad_words=[[7, 8, 9], [8, 9], [9, 9]], max_tokens=10)
    logits = torch.zeros(1, VOCAB_SIZE)
    tokens = list(PROMPT)
    drawn = []
    for best in (7, 8, 9, 9, 9):
        logits[:] = 0
        logits[0, best], logits[0, 2] = 5, 4
        [token] = world.check([(sequence, tokens, 0)], logits)
        tokens.append(token)
        drawn.append(token)
    assert drawn == [7, 8, 2, 9, 2]


def test_an_end_is_banned_until_there_are_enough_tokens() -> None:
    world = World(1)
    sequence = make_sequence(0, min_tokens=2, eos_token_ids=[9], stop_token_ids=[8])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [9, 8, 7]] = torch.tensor([3.0, 2.0, 1.0])
    tokens = list(PROMPT)
    for _ in range(4):
        tokens += world.check([(sequence, tokens, 0)], logits)
    assert tokens[len(PROMPT) :] == [7, 7, 9, 9]


def test_back_in_a_row_that_another_has_used() -> None:
    world = World(2)
    other, first = make_sequence(1, repetition_penalty=3.0), make_sequence(0, repetition_penalty=3.0, top_k=5)
    logits = torch.full((2, VOCAB_SIZE), -9.0)
    logits[:, [7, 8]] = torch.tensor([3.0, 2.0])
    long, longer = [*PROMPT, 7], [*PROMPT, 7, 10, 9]
    world.check([(first, longer, 0), (other, long, 0)], logits)
    # This sequence needs no history, but it has the first one's row while the histories of both rows are extended.
    world.check([(make_sequence(0, PROMPT, logit_bias={1: 2.0}), [*PROMPT, 1], 0), (other, longer, 0)], logits)
    assert world.check([(first, [*longer, 2], 0), (other, [*longer, 7], 0)], logits) == [8, 8]


def test_choices_fork_from_one_row() -> None:
    world = World(4)
    fields: dict[str, Any] = {
        "n": 3, "temperature": 1.5, "top_p": 0.9, "frequency_penalty": 1.0, "repetition_penalty": 1.3,
        "bad_words": [[3, 4], [5, 5, 6]], "logprobs": 2, "seed": 5,
    }  # fmt: skip
    first = make_sequence(2, **fields)
    logits = torch.randn(1, VOCAB_SIZE).expand(3, -1).contiguous()
    tokens = world.check([(first, PROMPT, choice) for choice in range(3)], logits)
    group = [first, first.fork(1), first.fork(2)]
    truth = {sequence: [*PROMPT, token] for sequence, token in zip(group, tokens, strict=True)}
    for sequence, row in zip(group, (2, 0, 3), strict=True):
        sequence.row = row
    for _ in range(4):
        tokens = world.check([(sequence, truth[sequence], sequence.choice) for sequence in group])
        for sequence, token in zip(group, tokens, strict=True):
            truth[sequence].append(token)


def test_choices_may_share_a_row_of_logits() -> None:
    world = World(1)
    sequence = make_sequence(0, n=4, temperature=1.0, presence_penalty=1.0, logprobs=0, seed=3)
    draws = [(sequence, PROMPT, choice) for choice in range(4)]
    world.begin(draws)
    logits = torch.randn(1, VOCAB_SIZE)
    newest, tokens = torch.tensor([PROMPT[-1]], device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    spare = world.table.spare
    drawn = world.sampler.draw(
        logits.to(DEVICE), newest, tokens,
        [RowDraw(0, len(PROMPT), choice, 0, choice, spare if choice else 0) for choice in range(4)],
    )  # fmt: skip
    assert drawn.logprobs is not None
    choices = drawn.choices(tokens.tolist(), drawn.logprobs.tolist())
    assert_equal(choices, logits.expand(4, -1), draws)
    assert world.table.last_tokens[0] == choices[0].token


def test_more_edits_than_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_engine.draw_groups._MOST_EDITED", 3)
    world = World(8)
    kinds = list(EDITS.values())
    rows = [make_sequence(row, temperature=1.0, seed=row, **kinds[-1 - row]) for row in range(8)]
    shared = make_sequence(7, n=5, temperature=1.0, repetition_penalty=1.5)
    truth = {sequence: [*PROMPT, *OUTPUT] for sequence in rows[:7]}
    for _ in range(3):
        drawn = world.check(
            [*((sequence, tokens, 0) for sequence, tokens in truth.items()), *((shared, PROMPT, c) for c in range(5))]
        )
        for tokens, token in zip(truth.values(), drawn, strict=False):
            tokens.append(token)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    world = World(8)
    kinds = [EDITS["everything"], {}, EDITS["all penalties"], {"logprobs": 0}]
    rows = [make_sequence(row, temperature=0.8, seed=row, **kinds[row % 4]) for row in range(8)]
    world.check([(sequence, [*PROMPT, *OUTPUT], 0) for sequence in rows], torch.randn(8, VOCAB_SIZE).to(dtype))


def test_the_best_of_equals_is_the_first_with_a_top_k_of_one() -> None:
    sequences = [make_sequence(row, temperature=1.0, top_k=1, seed=row) for row in range(5)]
    assert World(5).check([(s, PROMPT, 0) for s in sequences], torch.zeros(5, VOCAB_SIZE)) == [0] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_warming_up_changes_no_draw(dtype: torch.dtype) -> None:
    world = World(2)
    sequence = make_sequence(0, **EDITS["everything"])
    world.check([(sequence, [*PROMPT, *OUTPUT], 0)])
    world.sampler.warm_up(dtype)
    world.check([(sequence, [*PROMPT, *OUTPUT, 1], 0)])


def test_nothing_but_positions_travels_while_the_same_sequences_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    import baton_engine.device_sampler

    uploads: list[int] = []
    plain = baton_engine.device_sampler.to_device

    def counted(values: Any, *arguments: Any) -> torch.Tensor:
        uploads.append(len(values))
        return plain(values, *arguments)

    for module in ("device_sampler", "draw_groups", "row_table"):
        monkeypatch.setattr(f"baton_engine.{module}.to_device", counted)
    sequences = [make_sequence(row, **EDITS["everything"], top_p=0.5, temperature=1.0, logprobs=1) for row in range(4)]
    world = World(4)
    world.begin([(sequence, PROMPT, 0) for sequence in sequences])
    for end in range(len(PROMPT), len(PROMPT) + 3):
        uploads.clear()
        logits, inputs = torch.randn(4, VOCAB_SIZE, device=DEVICE), torch.full((4,), 3, device=DEVICE)
        world.table.take(StepPlan(rows=[0, 1, 2, 3]))
        world.sampler.draw(logits, inputs, inputs.clone(), [RowDraw(row, end, 0, row, row, row) for row in range(4)])
        if end > len(PROMPT):
            assert uploads == [4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(dtype: torch.dtype) -> None:
    """Rows with masks give the tokens of the host's sampler, even if all tokens that a mask allows are banned."""
    world = World(8)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1, "top_k": 3, "logprobs": 2},
        {"temperature": 1.0, "seed": 2, **EDITS["all penalties"]},
        {"temperature": 1.0, "seed": 3, "allowed_token_ids": [0]},
        {"temperature": 1.0, "seed": 4, "bad_words": [[9, 4, 11], [5]], "logit_bias": {7: 9.0}},
    ]
    rule = Grammar(GrammarKind.REGEX, "")
    sequences = [make_sequence(row, grammar=rule, **kind) for row, kind in enumerate(kinds)]
    world.begin([(sequence, [*PROMPT, *OUTPUT], 0) for sequence in sequences])
    masks = np.random.default_rng(3).integers(-(2**31), 2**31, (3, 2)).astype(np.int32)
    masks[:, 0] &= ~1
    mask_of = [2, 0, 1, 1, 2]
    logits = torch.randn(6, VOCAB_SIZE).to(dtype)
    at = [3, 0, 5, 1, 2]
    inputs, tokens = torch.full((6,), OUTPUT[-1], device=DEVICE), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    end = len(PROMPT) + len(OUTPUT)
    draws = [RowDraw(row, end, 0, at[row], row, row, mask_of[row]) for row in range(5)]
    drawn = world.sampler.draw(logits.to(DEVICE), inputs, tokens, draws, torch.from_numpy(masks).to(DEVICE))
    expected = sample(
        logits.float(),
        [Draw(s.sampling, PROMPT, OUTPUT, at[row], 0, masks[mask_of[row]]) for row, s in enumerate(sequences)],
    )
    assert tokens.tolist() == expected == world.table.last_tokens[:5].tolist()
    assert drawn.logprobs is not None
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert all(bits[mask_of[row], token] for row, token in enumerate(expected))
