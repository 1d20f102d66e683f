"""How many threads an engine uses on CPU, and how they wait for one another.

The threads of a step synchronize after every matrix product. A thread that spins until the others arrive loses only
microseconds each time, but keeps a core from all other processes of the machine. A thread that sleeps takes no core,
but waking it takes as long as a small product. So an engine spins only where no other engine shares its cores. It uses
another thread only if each then has a least number of a layer's weights, which is larger for threads that sleep.
"""

import math
from collections.abc import Mapping

import msgspec

from .config import EngineConfig

# Weights of a layer for each thread, from which on another thread makes every kind of step clearly faster, as measured
# by loadtest/engine/threads_bench.py.
_WEIGHTS_PER_SPINNING_THREAD = 500_000
_WEIGHTS_PER_SLEEPING_THREAD = 4_000_000


class Threads(msgspec.Struct, frozen=True):
    """The threads of an engine on CPU. spin: whether they keep their cores busy while they wait."""

    count: int
    spin: bool
    reason: str  # why so many, for the log

    def __str__(self) -> str:
        return f"{self.count} ({self.reason}); while they wait, they {'spin' if self.spin else 'sleep'}"


def choose_threads(config: EngineConfig, layer_weights: int, cores: float, environ: Mapping[str, str]) -> Threads:
    """Return the threads that suit a model on this machine, or as many as config says.

    layer_weights: the weights of one layer. cores: the number that this process and the engines that share them may
    keep busy. environ: of this process.
    """
    spin = _spins(environ)
    if config.num_threads is not None:
        return _threads(config.num_threads, spin, "as --num-threads says")
    engines = (config.engines_sharing_cpu or 1) * config.processes
    least = _WEIGHTS_PER_SPINNING_THREAD if spin else _WEIGHTS_PER_SLEEPING_THREAD
    # Rounded down: the kernel stops a process that has used up its quota until the next period begins.
    most = math.floor(cores / engines)
    sharing = "one engine" if engines == 1 else f"{engines} engine processes"
    reason = f"{cores:g} cores for {sharing}, {layer_weights / 1e6:.1f} million weights in a layer"
    return _threads(max(min(most, layer_weights // least), 1), spin, reason)


def _threads(count: int, spin: bool, reason: str) -> Threads:
    return Threads(count, spin and count > 1, reason)


def waiting_environment(engines_sharing_cpu: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to a new engine process's environ, so that its threads sleep on shared cores.

    The OpenMP library of torch reads these variables once, when it is loaded. Nothing is added if the user has set one.
    """
    if engines_sharing_cpu == 1 or environ.get("OMP_WAIT_POLICY") or environ.get("GOMP_SPINCOUNT"):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def _spins(environ: Mapping[str, str]) -> bool:
    """Whether libgomp's threads spin before they sleep ("Environment Variables" in its manual)."""
    if spins := environ.get("GOMP_SPINCOUNT", "").strip():
        return spins != "0"
    return environ.get("OMP_WAIT_POLICY", "").strip().upper() != "PASSIVE"
