"""A network partition that cuts off a prefill worker and ends again, while requests are answered.

Run as `python -m tests.chaos.partition MODEL LOGS SEED`, in a network namespace of its own that it may administer.
Ends with status 0 if all went well.
"""

import asyncio
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.e2e.pod import Pod
from tests.e2e.prompts import make_prompt
from tests.models import reference_choices

from .cable import FAR_ADDRESS, Cable, Side
from .fleet import LEASE_S, MODEL_NAME, WORKER_TIMEOUT_S
from .service import Service, is_error, read_log

_PREFILL_PORT, _DECODE_PORT, _GATEWAY_PORT = 20_001, 20_002, 20_003
_PAUSE_S = 0.25
_BOUND_S = 30.0
_LENGTH = 400
# Shorter than the gateway's patience with a silent worker, longer than that, and longer than gRPC's with a connection.
_CUTS: list[tuple[Side, tuple[float, float]]] = [("far", (0.5, 1.0)), ("near", (3.0, 4.0)), ("far", (12.0, 14.0))]


class Asker:
    """Sends a request every so often, whether those before are answered or not."""

    def __init__(self, model: Path, seed: int) -> None:
        self.answered = 0
        self.slowest_s = 0.0
        self._model = model
        self._seeds = itertools.count(seed * 1_000)
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{_GATEWAY_PORT}", timeout=_BOUND_S)

    async def run(self, until: asyncio.Event) -> None:
        """Ask until told to end, and wait for the last answer. A wrong or missing one is an error."""
        async with self._http, asyncio.TaskGroup() as group:
            while not until.is_set():
                group.create_task(self._ask(make_prompt(_LENGTH, next(self._seeds))))
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, prompt: list[int]) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {"model": MODEL_NAME, "prompt": prompt, **fields}
        response = await self._http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        tokens = response.json()["choices"][0]["token_ids"]
        assert len(tokens) == fields["max_tokens"]
        assert tokens == reference_choices(self._model, prompt, tokens), prompt
        self.answered += 1
        self.slowest_s = max(self.slowest_s, loop.time() - begun)


async def until_ready() -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{_GATEWAY_PORT}") as http, asyncio.timeout(60):
        while True:
            try:
                if (await http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def cut_and_mend(cable: Cable, side: Side, seconds: float, asker: Asker, prefill: Pod, decode: Pod) -> None:
    """Part the workers in the middle of a hand-over; the decode worker does without, and then does not need to."""
    await decode.until(lambda load: load.tickets)
    cable.cut(side)
    await asyncio.sleep(seconds / 2)
    before = asker.answered
    await asyncio.sleep(seconds / 2)
    if seconds > 2 * WORKER_TIMEOUT_S:
        assert asker.answered > before, "nothing was answered during the partition"
    cable.mend(side)
    computed = (await prefill.load()).prefix_queries
    await prefill.until(lambda load: load.prefix_queries > computed)
    print(f"{side} end down for {seconds:.2f} s: {asker.answered} answers, the slowest after {asker.slowest_s:.1f} s")


async def main(model: Path, logs: Path, seed: int) -> None:
    rng = random.Random(seed)
    prefill, decode = Pod(f"{FAR_ADDRESS}:{_PREFILL_PORT}"), Pod(f"127.0.0.1:{_DECODE_PORT}")
    worker: dict[str, Any] = {"model": model, "num_threads": 1, "num_blocks": 512}
    async with Cable.plugged() as cable:
        # A step of few tokens, so that a prompt takes many.
        far = {**worker, "host": FAR_ADDRESS, "port": _PREFILL_PORT, "max_num_batched_tokens": 8}
        near = {**worker, "port": _DECODE_PORT, "lease_seconds": LEASE_S, "prefill_networks": prefill.address}
        front = {
            **{"model": model, "served_model_name": MODEL_NAME, "host": "127.0.0.1", "port": _GATEWAY_PORT},
            **{"decode_addresses": decode.address, "prefill_addresses": prefill.address},
            **{"worker_timeout_s": WORKER_TIMEOUT_S, "admin_port": 0},
        }
        outputs = [logs / f"{name}.log" for name in ("prefill", "decode", "gateway")]
        services = [
            await Service.start(outputs[0], "prefill", far, prefix=cable.far_prefix),
            await Service.start(outputs[1], "decode", near),
            await Service.start(outputs[2], "gateway", front),
        ]
        try:
            await until_ready()
            asker, enough = Asker(model, seed), asyncio.Event()
            asking = asyncio.create_task(asker.run(enough))
            for side, seconds in _CUTS:
                await cut_and_mend(cable, side, rng.uniform(*seconds), asker, prefill, decode)
                assert not asking.done(), await asking
            enough.set()
            await asking
            await asyncio.gather(prefill.idle(), decode.idle())
            errors = [line for output in outputs for line in read_log(output) if is_error(line)]
            assert not errors, errors
            assert all(service.alive for service in services)
        finally:
            await asyncio.gather(*(service.kill() for service in services))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
