"""How `make test` deals the tests to its three processes."""

from typing import Final

import pytest
from xdist.scheduler import LoadScopeScheduling

# Folders whose tests start pods, most of them several processes that share the cores. The tests of a row run one after
# another, since they share pods and some of them measure time. These tests mostly wait, which is why there are more
# processes than cores.
_WITH_PODS: Final = (
    {"e2e"},
    {"chaos", "cli", "clients", "fuzz_peers", "ingress", "loadtest", "prometheus"},
)


class Groups(LoadScopeScheduling):
    """Deals the tests by groups, in the order in which `longest_first` puts them.

    Two processes take the tests that start pods, one row each. The third takes the tests of one file after another, and
    the first two join it at the end.
    """

    def _split_scope(self, nodeid: str) -> str:
        row = _row(nodeid)
        return f"pods {row}" if row < len(_WITH_PODS) else nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the tests so that the groups that take longest begin first; within a group their order stays."""
    items.sort(key=lambda item: _row(item.nodeid))


def _row(nodeid: str) -> int:
    """Return the row of _WITH_PODS in which a test's folder stands, or the number of rows."""
    folder = nodeid.split("/")[1]
    return next((row for row, folders in enumerate(_WITH_PODS) if folder in folders), len(_WITH_PODS))
