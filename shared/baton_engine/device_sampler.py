"""The sampler for a GPU: what sampler.py does, in the same order and with the same noise, without the host.

Tokens that the host has not read yet take part: a sequence's tokens are kept in a table on the device. They are
uploaded when the sequence is new in its row, or has skipped a step there; otherwise each step adds its input token,
which is on the device anyway. Everything else that a draw needs follows from the parameters and is uploaded when other
sequences than the last time are drawn for, so that in a run of decode steps only the positions travel.

A draw differs from sampler.py's only where rounding decides (kernels/baton_kernels/thresholds.py).
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch

from baton_kernels.logprobs import chosen_logprobs
from baton_kernels.penalties import apply_penalties
from baton_kernels.sampling import FEW_ROWS, gumbel_argmax
from baton_kernels.thresholds import thresholds

from .runner import Choice
from .sampling import SamplingParams, TokenLogprobs
from .sequence import Sequence
from .transfer import to_device

_OFF = float("-inf")
# Bounds the memory of float32 copies of logits.
_MOST_EDITED = 128
_PADDING = -1

# What a group has of each draw. ROW is that of logits, TABLE_ROW the sequence's own.
INDEX, ROW, TABLE_ROW, PROMPT_LEN, SEED, CHOICE, TOP_K = range(7)
HEAT, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)


def is_special(params: SamplingParams) -> bool:
    """Whether a draw takes more than logits, and what numbers say of it: it reads tokens, or reports logprobs."""
    return params.edits_logits or params.logprobs is not None


class RowDraw(msgspec.Struct):
    """One token to choose: after logits row `row`, for a choice of a sequence of `end` tokens, the last of which may be
    known on the device alone."""

    sequence: Sequence
    end: int
    choice: int
    row: int

    @property
    def early(self) -> bool:
        return self.end - self.sequence.prompt_len < self.sequence.sampling.min_tokens


class Drawn(msgspec.Struct):
    """Tokens of some draws, in their order, and the logprobs of those that want them.

    tokens: [draws] int64, NOT_FINITE as gumbel_argmax has it. logprobs: [draws that want any, 2 + 2 * n] float32, None
    when there are none: logprob, rank, the n best token ids, their logprobs. Both on the device. counts: the
    alternatives that each draw wants.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    counts: list[int | None]

    def choices(self, tokens: list[int], logprobs: list[list[float]]) -> list[Choice]:
        """Return what was drawn, given the values of both tensors on the host."""
        entries = iter(logprobs)
        return [
            Choice(token, None if count is None else _entry(token, next(entries), count))
            for token, count in zip(tokens, self.counts, strict=True)
        ]


def _entry(token: int, values: list[float], count: int) -> TokenLogprobs:
    # Token ids and ranks are exact in float32: the vocabulary is smaller than 2^24.
    best, middle = values[2:], len(values) // 2 - 1
    ids = [int(id) for id in best[:middle]]
    return TokenLogprobs(token, values[0], int(values[1]), ids[:count], best[middle:][:count])


class _Lists(msgspec.Struct):
    """The token ids that a sequence's parameters name."""

    allowed: np.ndarray
    banned: np.ndarray
    banned_early: np.ndarray
    biased: np.ndarray
    biases: np.ndarray
    words: list[list[int]]  # of more than one token
    needs_history: bool


class _Words(msgspec.Struct):
    """Bad words of more than one token: which draws they are for, how they begin, and the token that ends them."""

    draws: torch.Tensor  # [W]
    beginnings: torch.Tensor  # [W, longest], padded on the left
    lengths: torch.Tensor  # [W], of the beginnings
    ends: torch.Tensor  # [W], places in the flattened scores


class _Group(msgspec.Struct):
    """Draws that go the same way, and what is the same for them in each step, on the device.

    Places are token ids in the flattened scores [draws * vocab].
    """

    indices: list[int]  # of the draws
    rows: list[int]  # of logits
    ints: torch.Tensor  # [7, n] int64
    floats: torch.Tensor  # [6, n] float32
    filters: bool
    edits: bool
    penalties: bool = False
    allowed_draws: torch.Tensor | None = None
    allowed: torch.Tensor | None = None  # places
    banned: torch.Tensor | None = None  # places
    biased: torch.Tensor | None = None  # places
    biases: torch.Tensor | None = None
    words: _Words | None = None
    remembered: list[int] = []  # a draw of each sequence whose tokens so far matter
    overwritten: list[int] = []  # rows of the others in the table


class _Plan(msgspec.Struct):
    """All about the draws of a step that holds for the next step too, while the same sequences are drawn for."""

    key: list[tuple[Sequence, int, int, int, bool]]
    groups: list[_Group]
    counts: list[int | None]
    wanted_rows: list[int]  # rows of logits of the draws that want logprobs
    wanted: torch.Tensor  # indices of those draws
    wanted_logits_rows: torch.Tensor


class DeviceSampler:
    """Draws tokens for sequences in rows [0, max_rows) of at most max_len tokens. All work is queued on the device; the
    host waits for none of it."""

    def __init__(self, max_rows: int, max_len: int, vocab: int, device: torch.device) -> None:
        assert vocab < 1 << 24
        self._device = device
        self._vocab = vocab
        self._max_len = max_len
        self._history = torch.zeros(max_rows, max_len, dtype=torch.int32, device=device)
        # Whose tokens are in a row, and how many.
        self._owners: list[tuple[Sequence, int] | None] = [None] * max_rows
        self._lists: WeakKeyDictionary[Sequence, _Lists] = WeakKeyDictionary()
        self._plan: _Plan | None = None

    @torch.inference_mode()
    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels for logits of this type, which takes seconds that no request should wait for."""
        for count in (1, FEW_ROWS + 1):
            ints = torch.zeros(count, dtype=torch.int64, device=self._device)
            ones = torch.ones(count, device=self._device)
            for kind in {dtype, torch.float32}:
                scores = torch.zeros(count, self._vocab, dtype=kind, device=self._device)
                least = thresholds(scores, ones, ints, ones, ones)
                gumbel_argmax(scores, ones, least, ints, ints, ints)
            apply_penalties(scores.float(), self._history, ints, ints, ints, ones, ones, ones)
            chosen_logprobs(scores.to(dtype), ints)

    def forget(self) -> None:
        """Forget all sequences."""
        self._owners = [None] * len(self._owners)
        self._lists.clear()
        self._plan = None

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, inputs: torch.Tensor, draws: list[RowDraw]) -> Drawn:
        """logits: [B, vocab], contiguous, not changed. inputs: [B] int64, the token that a row of logits follows.

        draws: at least one; several may share a row. All tokens but the newest of each sequence must be known to the
        host when the sequence is new in its row.
        """
        plan = self._plan_for(draws)
        tokens = torch.empty(len(draws), dtype=torch.int64, device=self._device)
        for group in plan.groups:
            ends = to_device([draws[index].end for index in group.indices], self._device)
            scores = _take(logits, group.rows, group.ints[ROW])
            if group.edits:
                scores = scores.to(torch.float32, copy=True)
                if group.remembered:
                    self._extend_history(group, draws, inputs, ends)
                self._edit(scores, group, ends)
            tokens.index_copy_(0, group.ints[INDEX], _choose(scores, group, ends))
        return Drawn(tokens, self._logprobs(logits, tokens, plan), plan.counts)

    def _extend_history(self, group: _Group, draws: list[RowDraw], inputs: torch.Tensor, ends: torch.Tensor) -> None:
        """Make the table hold the group's tokens up to the newest."""
        stale: list[RowDraw] = []
        for row in group.overwritten:
            self._owners[row] = None
        for draw in (draws[index] for index in group.remembered):
            # The newest token is there already when another group has draws for this sequence.
            if self._owners[draw.sequence.row] not in [(draw.sequence, draw.end - 1), (draw.sequence, draw.end)]:
                stale.append(draw)
            self._owners[draw.sequence.row] = draw.sequence, draw.end
        self._upload_history(stale)
        newest = inputs.index_select(0, group.ints[ROW]).to(torch.int32)
        self._history.view(-1).index_copy_(0, group.ints[TABLE_ROW] * self._max_len + ends - 1, newest)

    def _upload_history(self, draws: list[RowDraw]) -> None:
        """Put the tokens of sequences before their newest into their rows; a prompt that several share comes once."""
        sources = {id(draw.sequence.prompt): draw for draw in reversed(draws)}
        whole = list(sources.values())
        width = max((draw.end - 1 for draw in whole), default=0)
        if width:
            table = np.zeros((len(whole), width), dtype=np.int32)
            for line, draw in zip(table, whole, strict=True):
                line[: draw.end - 1] = draw.sequence.tokens(0, draw.end - 1)
            rows = to_device([draw.sequence.row for draw in whole], self._device)
            self._history[:, :width].index_copy_(0, rows, to_device(table, self._device, torch.int32))
            del table
        forks = [draw for draw in draws if sources[id(draw.sequence.prompt)] is not draw]
        if not forks:
            return
        prompts = self._history[:, : max(draw.sequence.prompt_len for draw in forks)]
        origins = to_device([sources[id(draw.sequence.prompt)].sequence.row for draw in forks], self._device)
        rows = to_device([draw.sequence.row for draw in forks], self._device)
        prompts.index_copy_(0, rows, prompts.index_select(0, origins))
        places: list[int] = []
        outputs: list[int] = []
        for draw in forks:
            first = draw.sequence.row * self._max_len
            places += range(first + draw.sequence.prompt_len, first + draw.end - 1)
            outputs += draw.sequence.tokens(draw.sequence.prompt_len, draw.end - 1)
        if places:
            newer = to_device(outputs, self._device).to(torch.int32)
            self._history.view(-1).index_copy_(0, to_device(places, self._device), newer)

    def _edit(self, scores: torch.Tensor, group: _Group, ends: torch.Tensor) -> None:
        """As sampler._edit, for the rows of a group [n, vocab] float32, in place."""
        flat = scores.view(-1)
        if group.allowed is not None and group.allowed_draws is not None:
            kept = flat.index_select(0, group.allowed)
            scores.index_fill_(0, group.allowed_draws, _OFF)
            flat.index_copy_(0, group.allowed, kept)
        if group.banned is not None:
            flat.index_fill_(0, group.banned, _OFF)
        if group.words is not None:
            # Words may end with the same token: adding gives the same sum in every order, as all is -inf or 0.
            flat.index_add_(0, group.words.ends, self._penalty_of_words(group, group.words, ends))
        if group.biased is not None and group.biases is not None:
            flat.index_add_(0, group.biased, group.biases)
        if group.penalties:
            apply_penalties(
                scores, self._history, group.ints[TABLE_ROW], group.ints[PROMPT_LEN], ends,
                *group.floats[REPETITION:],
            )  # fmt: skip

    def _penalty_of_words(self, group: _Group, words: _Words, ends: torch.Tensor) -> torch.Tensor:
        """Return [W] float32: -inf where the output ends as the word begins, else 0."""
        end, longest = ends.index_select(0, words.draws), words.beginnings.shape[1]
        first = group.ints[TABLE_ROW].index_select(0, words.draws) * self._max_len + end - longest
        places = first.unsqueeze(1) + torch.arange(longest, device=self._device)
        tail = self._history.view(-1).index_select(0, places.view(-1).clamp_(min=0)).view_as(places)
        equal = ((tail == words.beginnings) | (words.beginnings == _PADDING)).all(dim=1)
        long_enough = end - group.ints[PROMPT_LEN].index_select(0, words.draws) >= words.lengths
        return torch.where(equal & long_enough, _OFF, 0.0)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, plan: _Plan) -> torch.Tensor | None:
        if not plan.wanted_rows:
            return None
        rows = _take(logits, plan.wanted_rows, plan.wanted_logits_rows)
        chosen, ranks, norms = chosen_logprobs(rows, tokens.index_select(0, plan.wanted).clamp_(min=0))
        columns = [chosen.unsqueeze(1), ranks.unsqueeze(1)]
        most = min(max(count or 0 for count in plan.counts), self._vocab)
        if most:
            best, ids = rows.topk(most, dim=-1)
            columns += [ids, best.float() - norms[:, :1] - norms[:, 1:]]
        return torch.cat([column.float() for column in columns], dim=1)

    def _plan_for(self, draws: list[RowDraw]) -> _Plan:
        key = [(draw.sequence, draw.sequence.row, draw.choice, draw.row, draw.early) for draw in draws]
        if self._plan is not None and self._plan.key == key:
            return self._plan
        edited = [i for i, draw in enumerate(draws) if draw.sequence.sampling.edits_logits]
        others = [i for i, draw in enumerate(draws) if not draw.sequence.sampling.edits_logits]
        groups = [
            self._group(part, [draws[index] for index in part], edits)
            for indices, edits, most in ((edited, True, _MOST_EDITED), (others, False, len(self._owners)))
            for part in (indices[first : first + most] for first in range(0, len(indices), most))
        ]
        counts = [draw.sequence.sampling.logprobs for draw in draws]
        wanted = [index for index, count in enumerate(counts) if count is not None]
        rows = [draws[index].row for index in wanted]
        self._plan = _Plan(
            key, groups, counts, rows, to_device(wanted, self._device), to_device(rows, self._device)
        )  # fmt: skip
        return self._plan

    def _group(self, indices: list[int], draws: list[RowDraw], edits: bool) -> _Group:
        params = [draw.sequence.sampling for draw in draws]
        ints = [
            indices,
            [draw.row for draw in draws],
            [draw.sequence.row for draw in draws],
            [draw.sequence.prompt_len for draw in draws],
            [p.seed_bits for p in params],
            [draw.choice for draw in draws],
            [min(p.top_k, self._vocab) for p in params],
        ]
        floats = [
            [p.heat for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [p.repetition_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        ]
        group = _Group(
            indices,
            [draw.row for draw in draws],
            self._columns(ints, np.int64, torch.int64),
            self._columns(floats, np.float32, torch.float32),
            filters=any(p.filters for p in params),
            edits=edits,
        )
        if edits:
            self._add_edits(group, draws)
        return group

    def _columns(self, values: list[list[int]] | list[list[float]], kind: type, dtype: torch.dtype) -> torch.Tensor:
        # Triton compiles a kernel anew for pointers of another alignment.
        width = len(values[0])
        table: np.ndarray = np.zeros((len(values), -(-width // 4) * 4), dtype=kind)
        table[:, :width] = values
        return to_device(table, self._device, dtype)[:, :width]

    def _add_edits(self, group: _Group, draws: list[RowDraw]) -> None:
        lists = [self._lists_of(draw.sequence) for draw in draws]
        group.penalties = any(draw.sequence.sampling.has_penalties for draw in draws)
        first = {draw.sequence: index for index, draw in zip(group.indices, draws, strict=True)}
        group.remembered = [index for sequence, index in first.items() if self._lists_of(sequence).needs_history]
        # A step writes the newest token of all draws of a group, which fits nobody's tokens in these rows.
        group.overwritten = [s.row for s in first if not self._lists_of(s).needs_history]
        allowed = [index for index, entry in enumerate(lists) if len(entry.allowed)]
        if allowed:
            group.allowed_draws = to_device(allowed, self._device)
        group.allowed = self._places(enumerate(entry.allowed for entry in lists))
        banned = [(index, entry.banned) for index, entry in enumerate(lists)]
        early = [(index, entry.banned_early) for index, entry in enumerate(lists) if draws[index].early]
        group.banned = self._places([*banned, *early])
        group.biased = self._places(enumerate(entry.biased for entry in lists))
        if group.biased is not None:
            biases = np.concatenate([entry.biases for entry in lists])
            group.biases = to_device(biases, self._device, torch.float32)
        words = [(index, word) for index, entry in enumerate(lists) for word in entry.words]
        if words:
            beginnings = np.full((len(words), max(len(word) for _, word in words) - 1), _PADDING, dtype=np.int32)
            for line, (_, word) in zip(beginnings, words, strict=True):
                line[1 - len(word) :] = word[:-1]
            group.words = _Words(
                to_device([index for index, _ in words], self._device),
                to_device(beginnings, self._device, torch.int32),
                to_device([len(word) - 1 for _, word in words], self._device),
                to_device([index * self._vocab + word[-1] for index, word in words], self._device),
            )

    def _places(self, lists: Iterable[tuple[int, np.ndarray]]) -> torch.Tensor | None:
        """Return the places of (index of the draw, token ids), None when there are no tokens."""
        places = np.concatenate([index * self._vocab + ids for index, ids in lists])
        return to_device(places, self._device) if len(places) else None

    def _lists_of(self, sequence: Sequence) -> _Lists:
        lists = self._lists.get(sequence)
        if lists is None:
            p = sequence.sampling
            stops = [token for token in (*p.eos_token_ids, *p.stop_token_ids) if token < self._vocab]
            lists = self._lists[sequence] = _Lists(
                allowed=np.array(p.allowed_token_ids, dtype=np.int64),
                banned=np.array([word[0] for word in p.bad_words if len(word) == 1], dtype=np.int64),
                banned_early=np.array(stops, dtype=np.int64),
                biased=np.array(list(p.logit_bias), dtype=np.int64),
                biases=np.array(list(p.logit_bias.values()), dtype=np.float32),
                words=[word for word in p.bad_words if len(word) > 1],
                needs_history=p.has_penalties or any(len(word) > 1 for word in p.bad_words),
            )
        return lists


def _take(logits: torch.Tensor, rows: list[int], index: torch.Tensor) -> torch.Tensor:
    """Return rows of logits, without a copy when they are the first ones in order."""
    return logits[: len(rows)] if rows == list(range(len(rows))) else logits.index_select(0, index)


def _choose(scores: torch.Tensor, group: _Group, ends: torch.Tensor) -> torch.Tensor:
    heats, seeds, choices = group.floats[HEAT], group.ints[SEED], group.ints[CHOICE]
    if group.filters:
        least = thresholds(scores, heats, group.ints[TOP_K], group.floats[TOP_P], group.floats[MIN_P])
    else:
        least = torch.full_like(heats, _OFF)
    return gumbel_argmax(scores, heats, least, seeds, ends, choices)
