"""How many threads an engine uses on CPU, and how they wait for one another.

The threads of a step meet after every matrix product. A thread that spins until the others are there loses microseconds
at each meeting, but takes a core from every other process of the machine. A thread that sleeps takes none, but waking
it costs as much time as a small product. So an engine spins only where it has its cores alone, and each of its threads
gets a least number of a layer's weights, which is larger where threads sleep.
"""

import math
from collections.abc import Mapping

import msgspec

from .config import EngineConfig
from .model_config import ModelConfig

# Where another thread makes every kind of step clearly faster, as loadtest/engine/threads_bench.py measures it.
_WEIGHTS_PER_SPINNING_THREAD = 500_000
_WEIGHTS_PER_SLEEPING_THREAD = 4_000_000


class Threads(msgspec.Struct, frozen=True):
    """The threads of an engine on CPU. spin: whether they keep their cores busy while they wait."""

    count: int
    spin: bool
    reason: str  # why so many, for the log

    def __str__(self) -> str:
        return f"{self.count} ({self.reason}); while they wait, they {'spin' if self.spin else 'sleep'}"


def choose_threads(config: EngineConfig, model: ModelConfig, cores: float, environ: Mapping[str, str]) -> Threads:
    """Return the threads that suit a model on this machine, or as many as config says.

    cores: how many this process and those that share them with it may keep busy. environ: that of this process.
    """
    spin = _spins(environ)
    if config.num_threads is not None:
        return _threads(config.num_threads, spin, "as --num-threads says")
    engines = config.engines_sharing_cpu or 1
    weights = model.layer_weights
    least = _WEIGHTS_PER_SPINNING_THREAD if spin else _WEIGHTS_PER_SLEEPING_THREAD
    # Rounded down: the kernel stops a process that has used up its quota until the next period begins.
    most = math.floor(cores / engines)
    sharing = "one engine" if engines == 1 else f"{engines} engines"
    reason = f"{cores:g} cores for {sharing}, {weights / 1e6:.1f} million weights in a layer"
    return _threads(max(min(most, weights // least), 1), spin, reason)


def _threads(count: int, spin: bool, reason: str) -> Threads:
    return Threads(count, spin and count > 1, reason)


def waiting_environment(engines_sharing_cpu: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to environ for a new engine process, so that its threads sleep where cores are shared.

    The OpenMP library of torch reads these variables once, when it is loaded. Those that the user has set stay.
    """
    if engines_sharing_cpu == 1 or environ.get("OMP_WAIT_POLICY") or environ.get("GOMP_SPINCOUNT"):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def _spins(environ: Mapping[str, str]) -> bool:
    """Whether libgomp's threads spin before they sleep ("Environment Variables" in its manual)."""
    if spins := environ.get("GOMP_SPINCOUNT", "").strip():
        return spins != "0"
    return environ.get("OMP_WAIT_POLICY", "").strip().upper() != "PASSIVE"
