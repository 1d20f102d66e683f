"""The tensors of single experts, from a checkpoint in which one tensor has the weights of all experts of a layer."""

from collections.abc import Collection

import torch

from .config import ConfigError
from .experts_method import ExpertNames, JoinedForm
from .source import Source

# The suffix of a joined tensor's name, by the suffix that the name of an expert's own tensor would have.
_ENDINGS = {".weight": "", ".weight_scale": "_scale", ".weight_scale_inv": "_scale_inv", ".bias": "_bias",
            "_blocks": "_blocks"}  # fmt: skip


class JoinedTensors:
    """Implements Tensors with names such as "3.up_proj.weight", [outputs, inputs], for single experts. Names that do
    not begin with a number are those of the checkpoint."""

    def __init__(
        self, source: Source, form: JoinedForm, names: ExpertNames, experts: int, hidden: int, size: int
    ) -> None:
        """source: the source of the joined tensors. names: with gates. hidden, size: the inputs of an expert, and its
        hidden units."""
        assert names.gate is not None
        self.dtype, self.device = source.dtype, source.device
        self._source, self._form, self._experts = source, form, experts
        # Whether a part is the first (0) or the second (1) one in its tensor; None = the tensor has no other.
        pair = (0, 1) if form.up is None else (None, None)
        self._parts = {
            names.gate: (form.gate_up, pair[0]), names.up: (form.up or form.gate_up, pair[1]),
            names.down: (form.down, None),
        }  # fmt: skip
        # Some tools store weights as [inputs, outputs]. The shape shows it, unless a weight is square.
        self._plain = form.down in source and (
            (source.stored_shape(form.gate_up), source.stored_shape(form.down))
            == ((experts, 2 * size if form.up is None else size, hidden), (experts, hidden, size))
        )
        # The part of each tensor that was taken last, and its experts: a tensor is needed for gates and again for ups.
        self._held: dict[str, tuple[range, torch.Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        joined = self._find(name)[1]
        return joined is not None and joined in self._source

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        number, joined, place = self._known(name)
        if number is None:
            return self._source.take(joined, shape, part, dtype)
        outputs, *inputs = shape
        whole = self._of_expert(number, joined, shape if place is None else (2 * outputs, *inputs), dtype)
        if place is not None:
            whole = whole[place::2] if self._form.interleaved else whole[place * outputs : (place + 1) * outputs]
        return (whole[part] if part else whole).contiguous()

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._source.stored_dtype(self._known(name)[1])

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the joined tensor."""
        return self._source.stored_shape(self._known(name)[1])

    def leave(self, prefix: str, numbers: Collection[int]) -> None:
        """Do nothing, as each rank takes a part of every tensor."""

    def _find(self, name: str) -> tuple[int | None, str | None, int | None]:
        """Return the number of the expert, the name of the joined tensor (None if it is not known), and which of its
        two parts the tensor is."""
        own = name.removeprefix(self._source.full_name(""))
        number, _, rest = own.partition(".")
        if not number.isdecimal():
            return None, own, None
        for part, (joined, place) in self._parts.items():
            ending = _ENDINGS.get(rest.removeprefix(part))
            if ending is not None:
                return int(number), joined + ending, place
        return int(number), None, None

    def _known(self, name: str) -> tuple[int | None, str, int | None]:
        """As _find. Raises ConfigError for a tensor that is not known."""
        number, joined, place = self._find(name)
        if joined is None:
            raise ConfigError(
                f"{self._source.full_name(self._form.gate_up)} has the weights of all experts together, which is "
                "served in 16 bits, also quantized on load, in FP8 with scales of outputs or tiles, MXFP4 and MXFP8"
            )
        return number, joined, place

    def _of_expert(self, number: int, joined: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an expert's part of a joined tensor. shape: that of the part."""
        if joined not in self._held or number not in self._held[joined][0]:
            # The next expert may not fit into memory beside the last one. Vectors are small.
            self._held.pop(joined, None)
            own = self._source.own_experts(self._experts)
            numbers = own if len(shape) == 1 else range(number, number + 1)
            self._held[joined] = numbers, self._take(numbers, joined, shape, dtype)
        numbers, tensor = self._held[joined]
        return tensor[number - numbers.start]

    def _take(self, numbers: range, joined: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the parts of some experts of a joined tensor, [experts, *shape]."""
        plain = self._is_plain(joined, shape)
        rows, *others = shape if plain else shape[::-1]
        if not self._form.flat:
            part = slice(numbers.start, numbers.stop)
            tensor = self._source.take(joined, (self._experts, rows, *others), (part,), dtype)
        else:
            part = slice(numbers.start * rows, numbers.stop * rows)
            tensor = self._source.take(joined, (self._experts * rows, *others), (part,), dtype).view(-1, rows, *others)
        return tensor if plain else tensor.transpose(1, 2)

    def _is_plain(self, joined: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor stores `shape` = [outputs, inputs] for each expert, and not [inputs, outputs]."""
        if self._form.flat or len(shape) == 1:
            return joined != self._form.down
        stored, turned = self._source.stored_shape(joined), (self._experts, *shape[::-1])
        return stored == (self._experts, *shape) and (stored != turned or self._plain)
