"""A rank of an engine whose weights are random, see random_weights.py."""

import os

from baton_engine.ranks import process
from loadtest.common.random_weights import SEED, random_weights_in_memory


def main() -> None:
    """Entry point. The arguments are those of baton_engine.ranks.process."""
    with random_weights_in_memory(int(os.environ[SEED])):
        process.main()
