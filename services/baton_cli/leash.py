"""Run as a script: `leash.py SUPERVISOR_PID COMMAND...` becomes COMMAND, which does not outlive the supervisor.

On Linux, the kernel kills the process however the supervisor ends, SIGKILL included (prctl(2),
PR_SET_PDEATHSIG). The setting survives exec. It is bound to the parent *thread*, so the supervisor must start its
children from its main thread. On other systems, only an orderly end of the supervisor stops the process.

The script runs under `python -I -S` to start within milliseconds, so it cannot import Baton.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _main(supervisor: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If the supervisor ended before prctl, the kernel will never send the signal.
        if os.getppid() != supervisor:
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
