"""Run as a script: `leash.py SUPERVISOR_PID COMMAND...` becomes COMMAND, tied to the life of the supervisor.

On Linux the kernel then kills the process when the supervisor ends in any way, SIGKILL included
(prctl(2), PR_SET_PDEATHSIG: the tie survives exec, and holds to the parent *thread*, so the supervisor must start
its children from its main thread). Elsewhere only an orderly end of the supervisor stops the process.

Starts under `python -I -S` to stay within milliseconds, hence imports nothing of Baton.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _main(supervisor: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The supervisor may have ended before the tie was made: then nobody would ever signal.
        if os.getppid() != supervisor:
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
