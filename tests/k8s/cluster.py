"""A Baton in the cluster of KUBECONFIG, through Helm's library and the Kubernetes client."""

import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import helm_python
import httpx
import yaml
from kubernetes import client, config

from tests.helm.charts import CHART

RELEASE = "e2e"
FULL_NAME = f"{RELEASE}-baton"
MODEL = "baton-demo"
WAIT_S = 600
PROXY_S = 30.0
PROXY_ERRORS = (502, 503, 504)

Values = dict[str, Any]


class Cluster:
    """A namespace with one release of Baton. Requests go through the API server, which outlives every pod."""

    def __init__(self, namespace: str) -> None:
        config.load_kube_config()
        self.namespace = namespace
        self.core, self.apps = client.CoreV1Api(), client.AppsV1Api()
        self._helm = helm_python.Config(namespace=namespace)
        access = client.Configuration.get_default_copy()
        context = ssl.create_default_context(cafile=access.ssl_ca_cert)
        if access.cert_file:
            context.load_cert_chain(access.cert_file, access.key_file)
        token = access.get_api_key_with_prefix("authorization")
        headers = {"authorization": token} if token else {}
        services = f"{access.host}/api/v1/namespaces/{namespace}/services"
        self.http = httpx.Client(verify=context, headers=headers, timeout=120)
        self.url = f"{services}/{FULL_NAME}-gateway:http/proxy"
        self.admin_url = f"{services}/{FULL_NAME}-gateway-admin:metrics/proxy"

    def values(self, **changes: Any) -> Values:
        """Return the laptop's values with every source allowed, because no label selects the API server's address."""
        values: Values = yaml.safe_load((CHART / "values-cpu-demo.yaml").read_text())
        values["networkPolicy"] = {
            **{"clients": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "prometheus": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}
        }
        values["models"]["demo"]["decode"]["replicas"] = 2
        values["gateway"]["replicas"] = 2
        values["models"]["demo"].update(changes)
        return values

    def install(self, values: Values) -> None:
        self._helm.install(str(CHART), RELEASE, values, create_namespace=True, wait="watcher", timeout=WAIT_S)

    def upgrade(self, values: Values) -> None:
        self._helm.upgrade(str(CHART), RELEASE, values, wait="watcher", timeout=WAIT_S)

    def test(self) -> str:
        return str(self._helm.test(RELEASE, timeout=WAIT_S, logs=True)["logs"])

    def uninstall(self) -> None:
        self._helm.uninstall(RELEASE, ignore_not_found=True, wait="watcher", timeout=WAIT_S)

    def pods(self, **labels: str) -> list[str]:
        selector = ",".join(
            [f"app.kubernetes.io/instance={RELEASE}", *(f"baton.dev/{k}={v}" for k, v in labels.items())]
        )
        found = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return [pod.metadata.name for pod in found if pod.metadata.deletion_timestamp is None]

    def kill(self, pod: str) -> None:
        """Delete a pod without a grace period."""
        self.core.delete_namespaced_pod(pod, self.namespace, grace_period_seconds=0)

    def ask(self, prompt: str, max_tokens: int = 64) -> str:
        """Return a greedy answer, which does not depend on the pods that serve it. Raises when it is incomplete."""
        body = {
            **{"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0},
            **{"max_tokens": max_tokens, "ignore_eos": True},
        }
        with self.http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        if lines[-1:] != ["data: [DONE]"]:
            raise RuntimeError(f"the stream ended with {lines[-1:]}")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])

    def dispatched(self) -> dict[str, int]:
        """Return the number of requests of each revision's decode pods, counted by one of the gateways."""
        counts: dict[str, int] = {}
        for pod in self._admin("pods")["pods"]:
            if pod["role"] == "decode":
                counts[pod["revision"]] = counts.get(pod["revision"], 0) + pod["dispatched"]
        return counts

    def _admin(self, page: str) -> Any:
        """Return a page of one gateway's admin port.

        The API server answers 502 to 504 by itself while the gateway that it has chosen is starting or ending. Raises
        httpx.HTTPStatusError when that does not pass within PROXY_S.
        """
        deadline = time.monotonic() + PROXY_S
        while True:
            answer = self.http.get(f"{self.admin_url}/{page}")
            if answer.status_code not in PROXY_ERRORS or time.monotonic() > deadline:
                return answer.raise_for_status().json()
            time.sleep(0.2)

    def leftovers(self) -> list[str]:
        """Return the remaining objects of the release."""
        selector = f"app.kubernetes.io/instance={RELEASE}"
        listers = (
            *(self.core.list_namespaced_pod, self.core.list_namespaced_service, self.core.list_namespaced_secret),
            *(self.core.list_namespaced_config_map, self.core.list_namespaced_persistent_volume_claim),
            *(self.core.list_namespaced_service_account, self.apps.list_namespaced_deployment),
            *(
                client.RbacAuthorizationV1Api().list_namespaced_role,
                client.PolicyV1Api().list_namespaced_pod_disruption_budget,
            ),
            client.NetworkingV1Api().list_namespaced_network_policy,
        )
        return [
            item.metadata.name for lister in listers for item in lister(self.namespace, label_selector=selector).items
        ]


def until(condition: Callable[[], bool], what: str, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(1)


@dataclass
class Load:
    """The answers and errors of requests that were sent continuously."""

    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@contextmanager
def load(cluster: Cluster, prompt: str, threads: int = 4) -> Iterator[Load]:
    """Send the same prompt from several threads until the block ends."""
    found, stop = Load(), Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                found.answers.append(cluster.ask(prompt))
            except Exception as error:
                found.failures.append(repr(error))
                stop.wait(1)

    running = [Thread(target=ask, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in running:
            thread.join()
