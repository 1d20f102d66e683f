"""The place of a process among those that divide a model."""

from dataclasses import dataclass

from baton_engine.config import EngineConfig
from baton_engine.stage import Stage


@dataclass(frozen=True)
class Seat:
    """number: the number of the process; 0 is the engine process. ranks: processes of each stage, which have
    consecutive numbers. stages: of the pipeline."""

    number: int
    ranks: int
    stages: int

    @classmethod
    def of(cls, config: EngineConfig, number: int) -> "Seat":
        return cls(number, config.tensor_parallel, config.pipeline_parallel)

    @property
    def rank(self) -> int:
        """The number of the process among those that divide each layer of its stage."""
        return self.number % self.ranks

    @property
    def stage_number(self) -> int:
        return self.number // self.ranks

    @property
    def stage(self) -> Stage:
        return Stage(self.stage_number, self.stages)

    @property
    def count(self) -> int:
        """The number of all processes."""
        return self.ranks * self.stages

    @property
    def name(self) -> str:
        """The name of the process in messages."""
        rank = f"rank {self.rank} of {self.ranks}"
        if self.stages == 1:
            return rank
        stage = f"stage {self.stage_number} of {self.stages}"
        return stage if self.ranks == 1 else f"{rank} in {stage}"

    @property
    def reports(self) -> bool:
        """Whether the process sends the results of steps to the engine process. The last stage alone has them."""
        return self.stages > 1 and self.stage.is_last and self.rank == 0
