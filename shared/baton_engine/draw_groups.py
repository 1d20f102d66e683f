"""Groups draws on a GPU by the work that they need, and keeps values on the device that stay the same between steps."""

from collections.abc import Iterable

import msgspec
import numpy as np
import torch

from .row_table import DeviceRowTable, needs_history
from .step_plan import NewRow
from .transfer import to_device

# Bounds the memory of float32 copies of logits.
_MOST_EDITED = 128
PADDING = -1

# The rows of Group.ints and of Group.floats, with one value for each draw. INDEX is the draw's place among the tokens
# of the step, ROW its row of logits, TABLE_ROW its row of the table, TARGET the row of the table that gets the token as
# its last one, and MASK its row of the masks.
INDEX, ROW, TABLE_ROW, TARGET, MASK, PROMPT_LEN, SEED, CHOICE, TOP_K = range(9)
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)


class RowDraw(msgspec.Struct):
    """One token to draw, for a choice of the sequence in a row of the table.

    end: the number of tokens before it, the last of which may be known only on the device. at: the row of logits.
    index: the token's place among those of the step. target: the row of the table that gets it as its last token; the
    spare row for choices that have not forked yet. mask: its row of the masks, when the draw has one.
    """

    row: int
    end: int
    choice: int
    at: int
    index: int
    target: int
    mask: int = 0


class _Lists(msgspec.Struct):
    """The token ids that a row's parameters name."""

    row: NewRow
    allowed: np.ndarray
    banned: np.ndarray
    banned_early: np.ndarray
    biased: np.ndarray
    biases: np.ndarray
    words: list[list[int]]  # of more than one token
    needs_history: bool


class Words(msgspec.Struct):
    """The bad words of more than one token."""

    draws: torch.Tensor  # [W], the draw that each word is for
    beginnings: torch.Tensor  # [W, longest], the tokens of each word but its last, padded on the left
    lengths: torch.Tensor  # [W], of the beginnings
    ends: torch.Tensor  # [W], place of each word's last token in the flattened scores


class Group(msgspec.Struct):
    """Draws that need the same work, and their values on the device, which stay the same from step to step.

    A place is the index of a token id in the flattened scores [draws * vocab].
    """

    indices: list[int]  # of the draws
    rows: list[int]  # of logits
    ints: torch.Tensor  # [9, n] int64
    floats: torch.Tensor  # [6, n] float32
    filters: bool
    edits: bool
    penalties: bool = False
    allowed_draws: torch.Tensor | None = None
    allowed: torch.Tensor | None = None  # places
    banned: torch.Tensor | None = None  # places
    biased: torch.Tensor | None = None  # places
    biases: torch.Tensor | None = None
    words: Words | None = None
    history: bool = False  # whether some draw depends on the tokens before it


class DrawPlan(msgspec.Struct):
    """The groups of some draws. A plan is valid for the next step too if its draws have the same key."""

    key: list[tuple[NewRow, int, int, int, int, int, bool]]
    groups: list[Group]
    counts: list[int | None]  # the number of alternatives that each draw wants logprobs of; None = no logprobs
    wanted_rows: list[int]  # rows of logits of the draws that want logprobs
    wanted: torch.Tensor  # the indices of their tokens among those of the step
    wanted_logits_rows: torch.Tensor  # wanted_rows on the device


class DrawGroups:
    """Makes plans of draws for the rows of a table."""

    def __init__(self, table: DeviceRowTable, vocab: int, device: torch.device) -> None:
        self._table, self._vocab, self._device = table, vocab, device
        self._lists: dict[int, _Lists] = {}

    def plan(self, draws: list[RowDraw], masked: bool, last: DrawPlan | None) -> DrawPlan:
        """Return the plan of some draws: `last` if it is still valid. masked: whether the draws have masks."""
        rows = [self._table[draw.row] for draw in draws]
        early = [_early(row, draw) for row, draw in zip(rows, draws, strict=True)]
        key = [
            (row, draw.choice, draw.at, draw.index, draw.target, draw.mask, soon)
            for row, draw, soon in zip(rows, draws, early, strict=True)
        ]
        if last is not None and last.key == key:
            return last
        edited = [index for index, row in enumerate(rows) if masked or row.sampling.edits_logits]
        others = [] if masked else [index for index, row in enumerate(rows) if not row.sampling.edits_logits]
        groups = [
            self._group(part, [draws[index] for index in part], edits)
            for indices, edits, most in ((edited, True, _MOST_EDITED), (others, False, max(len(others), 1)))
            for part in (indices[first : first + most] for first in range(0, len(indices), most))
        ]
        counts = [row.sampling.logprobs for row in rows]
        wanted = [draw for draw, count in zip(draws, counts, strict=True) if count is not None]
        at = [draw.at for draw in wanted]
        return DrawPlan(
            key, groups, counts, at, to_device([draw.index for draw in wanted], self._device),
            to_device(at, self._device),
        )  # fmt: skip

    def _group(self, indices: list[int], draws: list[RowDraw], edits: bool) -> Group:
        rows = [self._table[draw.row] for draw in draws]
        params = [row.sampling for row in rows]
        ints = [
            [draw.index for draw in draws],
            [draw.at for draw in draws],
            [draw.row for draw in draws],
            [draw.target for draw in draws],
            [draw.mask for draw in draws],
            [len(row.prompt) for row in rows],
            [p.seed_bits for p in params],
            [draw.choice for draw in draws],
            [min(p.top_k, self._vocab) for p in params],
        ]
        floats = [
            [p.draw_temperature for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [p.repetition_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        ]
        group = Group(
            indices,
            [draw.at for draw in draws],
            self._columns(ints, np.int64, torch.int64),
            self._columns(floats, np.float32, torch.float32),
            filters=any(p.filters for p in params),
            edits=edits,
        )
        if edits:
            self._add_edits(group, draws, rows)
        return group

    def _columns(self, values: list[list[int]] | list[list[float]], kind: type, dtype: torch.dtype) -> torch.Tensor:
        # Rows are padded to a multiple of 16 bytes: Triton compiles a kernel again for pointers of another alignment.
        width = len(values[0])
        table: np.ndarray = np.zeros((len(values), -(-width // 4) * 4), dtype=kind)
        table[:, :width] = values
        return to_device(table, self._device, dtype)[:, :width]

    def _add_edits(self, group: Group, draws: list[RowDraw], rows: list[NewRow]) -> None:
        lists = [self._lists_of(row) for row in rows]
        group.penalties = any(row.sampling.has_penalties for row in rows)
        group.history = any(entry.needs_history for entry in lists)
        allowed = [index for index, entry in enumerate(lists) if len(entry.allowed)]
        if allowed:
            group.allowed_draws = to_device(allowed, self._device)
        group.allowed = self._places(enumerate(entry.allowed for entry in lists))
        banned = [(index, entry.banned) for index, entry in enumerate(lists)]
        early = [(index, entry.banned_early) for index, entry in enumerate(lists) if _early(rows[index], draws[index])]
        group.banned = self._places([*banned, *early])
        group.biased = self._places(enumerate(entry.biased for entry in lists))
        if group.biased is not None:
            biases = np.concatenate([entry.biases for entry in lists])
            group.biases = to_device(biases, self._device, torch.float32)
        words = [(index, word) for index, entry in enumerate(lists) for word in entry.words]
        if words:
            beginnings = np.full((len(words), max(len(word) for _, word in words) - 1), PADDING, dtype=np.int32)
            for line, (_, word) in zip(beginnings, words, strict=True):
                line[1 - len(word) :] = word[:-1]
            group.words = Words(
                to_device([index for index, _ in words], self._device),
                to_device(beginnings, self._device, torch.int32),
                to_device([len(word) - 1 for _, word in words], self._device),
                to_device([index * self._vocab + word[-1] for index, word in words], self._device),
            )

    def _places(self, lists: Iterable[tuple[int, np.ndarray]]) -> torch.Tensor | None:
        """Return the places of pairs (index of the draw, token ids); None when there are no tokens."""
        places = np.concatenate([index * self._vocab + ids for index, ids in lists])
        return to_device(places, self._device) if len(places) else None

    def _lists_of(self, row: NewRow) -> _Lists:
        lists = self._lists.get(row.row)
        if lists is None or lists.row is not row:
            p = row.sampling
            stops = [token for token in (*p.eos_token_ids, *p.stop_token_ids) if token < self._vocab]
            lists = self._lists[row.row] = _Lists(
                row,
                allowed=np.array(p.allowed_token_ids, dtype=np.int64),
                banned=np.array([word[0] for word in p.bad_words if len(word) == 1], dtype=np.int64),
                banned_early=np.array(stops, dtype=np.int64),
                biased=np.array(list(p.logit_bias), dtype=np.int64),
                biases=np.array(list(p.logit_bias.values()), dtype=np.float32),
                words=[word for word in p.bad_words if len(word) > 1],
                needs_history=needs_history(p),
            )
        return lists


def _early(row: NewRow, draw: RowDraw) -> bool:
    """Whether the output is shorter than min_tokens."""
    return draw.end - len(row.prompt) < row.sampling.min_tokens
