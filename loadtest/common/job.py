"""The job of one process of the benchmark, which it receives as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """task: "prepare", "rows" or "profile". shape: its name in reports. ours, vllm: the settings of these engines.

    weights_in_memory: Baton's engine loads random weights that no file holds. long: the rows of long prompts belong to
    the rows, too. repeats: at least so many of each row. profile: the folder for traces.
    bandwidth, arithmetic: as in device.Card, for the limits; 0 = as measured.
    """

    task: str
    model: str
    shape: str
    seed: int
    scale: float
    quick: bool
    rows: str
    max_num_seqs: int
    max_num_batched_tokens: int
    ours: Json
    vllm: Json
    engine: str = "ours"
    make_weights: bool = False
    weights_in_memory: bool = False
    long: bool = False
    repeats: int = 0
    profile: str = ""
    bandwidth: float = 0.0
    arithmetic: float = 0.0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Job":
        return cls(**json.loads(path.read_text()))
