"""How `make test` deals the tests to its two processes."""

from typing import Final

import pytest
from xdist.scheduler import LoadScopeScheduling

# Folders whose tests start pods, most of them several processes that share the cores.
WITH_PODS: Final = {"chaos", "cli", "clients", "e2e", "fuzz_peers", "ingress", "loadtest", "prometheus"}


class TwoProcesses(LoadScopeScheduling):
    """Deals the tests by groups, in the order in which `pods_first` puts them.

    Tests that start pods run one after another in one process, since they share pods, choose ports and some of them
    measure time. The other process meanwhile takes the tests of one file after another, and the first one joins it at
    the end.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "pods" if _starts_pods(nodeid) else nodeid.partition("::")[0]


def pods_first(items: list[pytest.Item]) -> None:
    """Sort the tests so that the group that takes longest begins first; within a group their order stays."""
    items.sort(key=lambda item: not _starts_pods(item.nodeid))


def _starts_pods(nodeid: str) -> bool:
    return nodeid.split("/")[1] in WITH_PODS
