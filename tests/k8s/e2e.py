"""Baton in a cluster, from installation to uninstall: `make e2e-k8s`. The cluster must be able to pull the images.

The tests build on each other, in their order. BATON_E2E_NAMESPACE: the namespace, which is made and removed.
"""

import os
from collections.abc import Iterator

import pytest
from kubernetes.client import V1Namespace, V1ObjectMeta

from .cluster import Cluster, load, until

PROMPT = "What is Baton?"
CANARY = {"enabled": True, "revision": "next", "weight": 50}

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def cluster(processes: None) -> Iterator[Cluster]:
    namespace = os.environ.get("BATON_E2E_NAMESPACE", "baton-e2e")
    found = Cluster(namespace)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    found.core.create_namespace(V1Namespace(metadata=V1ObjectMeta(name=namespace, labels=labels)))
    try:
        yield found
    finally:
        found.uninstall()
        found.core.delete_namespace(namespace)


def test_installs_and_answers(cluster: Cluster) -> None:
    cluster.install(cluster.values())
    assert cluster.ask(PROMPT)
    assert "baton-demo: " in cluster.test()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_killed_pods_cost_no_answer(cluster: Cluster, role: str) -> None:
    expected = cluster.ask(PROMPT)
    with load(cluster, PROMPT) as asked:
        until(lambda: len(asked.answers) > 4, "some answers")
        victim = cluster.pods(role=role)[0]
        cluster.kill(victim)
        until(lambda: victim not in cluster.pods(role=role), "the pod is gone")
        seen = len(asked.answers)
        until(lambda: len(asked.answers) > seen + 20, "answers after the kill")
    assert asked.failures == []
    assert set(asked.answers) == {expected}


def test_an_upgrade_under_load_costs_no_answer(cluster: Cluster) -> None:
    values = cluster.values()
    values["gateway"]["podAnnotations"] = values["models"]["demo"]["worker"]["podAnnotations"] = {"upgrade": "1"}
    with load(cluster, PROMPT) as asked:
        cluster.upgrade(values)
        seen = len(asked.answers)
        until(lambda: len(asked.answers) > seen + 20, "answers after the upgrade")
    assert asked.failures == []
    assert len(set(asked.answers)) == 1


def test_a_canary_gets_its_share_and_is_rolled_back(cluster: Cluster) -> None:
    cluster.upgrade(cluster.values(canary=CANARY))
    with load(cluster, PROMPT) as asked:
        until(lambda: min(cluster.dispatched().get(revision, 0) for revision in ("stable", "next")) > 10, "both serve")
        cluster.upgrade(cluster.values(canary={**CANARY, "weight": 0}))
        cluster.upgrade(cluster.values())
        until(lambda: set(cluster.dispatched()) == {"stable"}, "the canary is gone")
    assert asked.failures == []


def test_a_canary_is_promoted(cluster: Cluster) -> None:
    overrides = {"worker": {"podAnnotations": {"version": "2"}}}
    with load(cluster, PROMPT) as asked:
        cluster.upgrade(cluster.values(canary={**CANARY, **overrides, "weight": 100}))
        until(lambda: cluster.dispatched().get("next", 0) > 10, "all goes to the canary")
        # The canary's settings become stable's settings while the canary serves.
        promoted = cluster.values(canary={**CANARY, **overrides, "weight": 100})
        promoted["models"]["demo"]["worker"].update(overrides["worker"])
        cluster.upgrade(promoted)
        promoted["models"]["demo"]["canary"]["weight"] = 0
        cluster.upgrade(promoted)
        del promoted["models"]["demo"]["canary"]
        cluster.upgrade(promoted)
    assert asked.failures == []
    assert not cluster.pods(revision="next")


def test_uninstalling_leaves_nothing(cluster: Cluster) -> None:
    cluster.uninstall()
    until(lambda: not cluster.leftovers(), "nothing is left")
