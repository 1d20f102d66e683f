"""Which consecutive layers of a model a process computes (Huang et al., "GPipe", 2019)."""

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

    def layers(self, num_layers: int) -> range:
        """Return this stage's layers of a model. Where they cannot be divided evenly, the first stages have one more.

        Raises ConfigError if there are fewer layers than stages.
        """
        if num_layers < self.count:
            raise ConfigError(f"--pipeline-parallel {self.count} is more than the model's {num_layers} layers")
        each, more = divmod(num_layers, self.count)
        first = self.number * each + min(self.number, more)
        return range(first, first + each + (self.number < more))

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
