"""A worker without a GPU needs no Triton: its image carries none, which saves 700 MB."""

import json
import subprocess
import sys

import pytest

from baton_demo import MODEL_DIR

PROGRAM = """
import importlib, json, pkgutil, sys
from importlib.abc import MetaPathFinder


class Refusing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"this worker has no {name}", name=name)


sys.meta_path.insert(0, Refusing())
for package in ("baton_worker", "baton_prefill", "baton_decode", "baton_kv", "baton_kernels.reference"):
    parent = importlib.import_module(package)
    for module in pkgutil.walk_packages(parent.__path__, f"{package}."):
        importlib.import_module(module.name)

import torch
from baton_common.extent import Extent
from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.sampling import SamplingParams
from baton_engine.sequence import Request

engine = Engine(EngineConfig(model=sys.argv[1], device="cpu", num_threads=1))
for id, sampling in enumerate([
    SamplingParams(max_tokens=8, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.8, seed=1, top_k=5, top_p=0.9, repetition_penalty=1.2),
]):
    engine.add(Request(id=id, prompt=list(range(5, 45)), sampling=sampling))
tokens = {}
while engine.has_work:
    for delta in engine.step().deltas:
        tokens.setdefault(delta.id, []).extend(delta.tokens)

cache = engine.runner.cache
part = Extent(first_token=3, num_tokens=9, first_layer=0, num_layers=1, first_head=0, num_heads=1)
values = torch.empty(cache.layout.size(part), dtype=torch.uint8)
moved = int(cache.gather([[0, 1]], part, values, check=True)) == int(cache.checksum(values))
loaded = [name for name in sys.modules if name.partition(".")[0] == "triton"]
print(json.dumps({"tokens": [len(tokens[0]), len(tokens[1])], "moved": moved, "loaded": loaded}))
"""

pytestmark = pytest.mark.processes


def test_a_worker_on_a_cpu_runs_where_triton_cannot_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(MODEL_DIR)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"tokens": [8, 8], "moved": True, "loaded": []}
