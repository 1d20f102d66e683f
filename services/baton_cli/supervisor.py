"""Runs a set of processes together: starts all, restarts those that die, and stops all in order."""

import asyncio
import signal
from collections.abc import Sequence

from baton_cli.child import Child, StartFailed
from baton_cli.display import Display

_EXIT_KILLED = 130


class Supervisor:
    """Owns the children from start to end.

    stages: the order of shutdown. The children of a stage stop together, and the next stage follows when they are gone.
    greeting: printed when all children of the first stage, which serves the users, have been ready.
    """

    def __init__(self, stages: Sequence[Sequence[Child]], display: Display, greeting: str) -> None:
        self._stages = stages
        self._display = display
        self._greeting = greeting
        self._stop = asyncio.Event()
        self._killed = False

    async def run(self) -> int:
        """Run until SIGINT, SIGTERM or SIGHUP, or until a child cannot start. Return the exit code.

        A second SIGINT kills all children at once. Call it in the main thread, because children die with their thread.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        runs = [asyncio.create_task(child.run()) for stage in self._stages for child in stage]
        greet = asyncio.create_task(self._greet())
        stopped = asyncio.create_task(self._stop.wait())
        ended, _ = await asyncio.wait([*runs, stopped], return_when=asyncio.FIRST_COMPLETED)
        greet.cancel()
        stopped.cancel()
        await self._stop_in_order()
        # A child's run ends by itself only with an error.
        failure = next((task.exception() for task in runs if task in ended), None)
        if isinstance(failure, StartFailed):
            self._display.say(str(failure))
            return 1
        if failure is not None:
            raise failure
        return _EXIT_KILLED if self._killed else 0

    async def _greet(self) -> None:
        for child in self._stages[0]:
            await child.was_ready.wait()
        self._display.started()
        self._display.say(self._greeting)

    async def _stop_in_order(self) -> None:
        for stage in self._stages:
            await asyncio.gather(*(child.stop() for child in stage))

    def _interrupt(self) -> None:
        if not self._stop.is_set():
            self._display.say("Stopping; Ctrl-C again kills at once")
        else:
            self._killed = True
            for stage in self._stages:
                for child in stage:
                    child.kill()
        self._stop.set()
