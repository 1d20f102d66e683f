"""Which consecutive layers of a model a process computes (Huang et al., "GPipe", 2019)."""

from collections.abc import Sequence

import torch

from .config import ConfigError


class Stage:
    """One of `count` parts of a model that are computed one after another, by a process each, or by its ranks.

    The first one embeds the tokens. Each sends its hidden states to the next one, and the last one draws.
    """

    def __init__(self, number: int = 0, count: int = 1) -> None:
        self.number, self.count = number, count

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def layers(self, num_layers: int, starts: Sequence[int] = ()) -> range:
        """Return this stage's layers of a model. Where they cannot be divided evenly, the first stages have one more.

        starts: the layers with which a stage may begin, in ascending order; empty = each layer. Those from one to the
        next then count as one. Raises ConfigError if there are fewer of them than stages.
        """
        begins = starts or range(num_layers)
        if len(begins) < self.count:
            what = f"{len(begins)} parts into which its layers can be divided" if starts else f"{num_layers} layers"
            raise ConfigError(f"--pipeline-parallel {self.count} is more than the model's {what}")
        each, more = divmod(len(begins), self.count)
        first = self.number * each + min(self.number, more)
        ends = [*begins, num_layers]
        return range(ends[first], ends[first + each + (self.number < more)])

    def receive(self, hidden: torch.Tensor) -> None:
        """Fill hidden [T, stream size] with what the previous stage has computed for the same step."""
        raise RuntimeError("no stage is before this one")

    def send(self, hidden: torch.Tensor) -> None:
        """Send hidden [T, stream size] to the next stage. The caller must not change it afterwards."""
        raise RuntimeError("no stage is after this one")

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all stages' layers. values: on the host, above 0 in this stage's layers and 0 in
        others."""
        return values


WHOLE = Stage()
