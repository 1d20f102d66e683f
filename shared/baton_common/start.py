"""Runs the `main` of a module: python -m baton_common.start MODULE ARGUMENTS

The garbage collector is off while modules are imported, and never scans the objects they have made, which live as long
as the process. Where torch is imported, collections would take a fifth of the start time.
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
