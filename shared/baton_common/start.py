"""Runs the `main` of a module: python -m baton_common.start MODULE ARGUMENTS

The garbage collector is off while modules are imported, and never scans what they made, which lives as long as the
process. For a process that imports torch, collections would be a fifth of the time of its start.
"""

import gc
import sys
from importlib import import_module


def main() -> None:
    gc.disable()
    # The module finds its arguments where it would find them if it were run itself.
    del sys.argv[0]
    module = import_module(sys.argv[0])
    gc.freeze()
    gc.enable()
    module.main()


if __name__ == "__main__":
    main()
