"""A prefill or decode pod whose engine follows a script: the real RPC process, without any computation.

Usage: scripted_pod.py prefill|decode --model DIR --port N --first-s S --step-s S
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[2]))

import msgspec

from baton_decode import main as decode
from baton_decode.settings import DecodeSettings
from baton_engine.delta import Delta
from baton_engine.sequence import FinishReason
from baton_prefill import main as prefill
from baton_prefill.settings import PrefillSettings
from baton_worker.messages import Abort, Add, Command, ImportTokens, Output
from loadtest.common.canned_engine import CannedEngine
from loadtest.gateway.script import Script, keep_stepping, script_arguments

_PREFILL_RATE = 20_000.0  # tokens a second, as reported to gateways


class ScriptedEngine(CannedEngine):
    """On a prefill pod it gives each prompt a first token in time; on a decode pod, each request a token a step."""

    def __init__(self, script: Script) -> None:
        super().__init__(num_layers=1, num_heads=1, head_dim=8, slot_bytes=1 << 20, num_slots=8)
        self.ready = msgspec.structs.replace(self.ready, prefill_rate=_PREFILL_RATE)
        self.first_token = script.token_id(0)
        self._script = script
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self.take = self._outputs.put_nowait
        self._prefilling: dict[int, asyncio.TimerHandle] = {}
        self._lengths: dict[int, int] = {}  # output tokens, by request
        self._running: dict[int, int] = {}  # tokens sent so far, by request
        self._stepping = asyncio.create_task(keep_stepping(script.step_s, self._step))

    def send(self, command: Command) -> None:
        match command:
            case Add(request) if request.exports_from is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(self._script.first_s, self._prefilled, request.id, command)
                self._prefilling[request.id] = timer
                return
            case Add(request):
                self._lengths[request.id] = request.sampling.max_tokens
            case ImportTokens(id):
                self._running[id] = 1
            case Abort(id):
                self._lengths.pop(id, None)
                self._running.pop(id, None)
                if id in self._prefilling:
                    self._prefilling.pop(id).cancel()
        super().send(command)

    def _prefilled(self, id: int, command: Command) -> None:
        del self._prefilling[id]
        super().send(command)

    def _step(self) -> None:
        deltas = []
        for id, position in list(self._running.items()):
            last = position + 1 >= self._lengths[id]
            reason = FinishReason.LENGTH if last else FinishReason.NONE
            deltas.append(Delta(id, 0, position, [self._script.token_id(position)], [], reason))
            self._running[id] += 1
            if last:
                del self._running[id], self._lengths[id]
        if deltas:
            self.take(Output(deltas=deltas))

    async def outputs(self) -> AsyncIterator[Output]:
        while True:
            yield await self._outputs.get()

    async def watch(self, timeout_s: float) -> None:
        """Do nothing, because a scripted engine cannot hang."""

    async def stop(self) -> None:
        self._stepping.cancel()


def main() -> None:
    parser = script_arguments(__doc__)
    parser.add_argument("role", choices=["prefill", "decode"])
    parser.add_argument("--opening", default="", help="text with which each answer begins")
    arguments = parser.parse_args()
    script = Script.of(arguments.model, arguments.first_s, arguments.step_s, arguments.opening)

    async def start(*_: Any) -> ScriptedEngine:
        return ScriptedEngine(script)

    with patch("baton_worker.server.EngineClient.start", start):
        if arguments.role == "prefill":
            prefill.main(PrefillSettings(model=arguments.model, port=arguments.port, log_level="warning"))
        else:
            decode.main(DecodeSettings(model=arguments.model, port=arguments.port, log_level="warning"))


if __name__ == "__main__":
    main()
