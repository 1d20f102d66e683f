"""A Kubernetes control plane without nodes: etcd, the API server and some controllers, as processes on this machine."""

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Self

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client import ApiException, V1Namespace, V1ObjectMeta

from baton_cli.ports import free_loopback_ports

START_S = 120
STOP_S = 30
TOKEN = "owners"
# Deployments get pods, which stay unscheduled, and the objects of a deleted owner are deleted.
CONTROLLERS = "deployment,replicaset,garbagecollector,namespace"


class ControlPlane:
    """Use it as a context manager. kubeconfig: for its administrator."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        """binaries: folder of etcd, kube-apiserver, kube-controller-manager and kubectl. folder: empty; for data."""
        self._binaries = binaries
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        self.kubeconfig = folder / "kubeconfig.yaml"

    def __enter__(self) -> Self:
        etcd, peer, api, manager = free_loopback_ports(4)
        self._write_access(api)
        try:
            self._start_etcd(etcd, peer)
            self._start_api_server(etcd, api)
            self._await_api_server()
            self._start("kube-controller-manager", *self._manager_flags(manager))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()

    def client(self) -> client.ApiClient:
        access = client.Configuration()
        config.load_kube_config(str(self.kubeconfig), client_configuration=access)
        return client.ApiClient(access)

    def kubectl(self, *arguments: str, stdin: str = "", **environment: str) -> str:
        """Raises subprocess.CalledProcessError."""
        command = [self._binaries / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        how: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 120}
        done = subprocess.run(command, input=stdin, env={**os.environ, **environment}, **how)
        return str(done.stdout)

    def make_namespace(self, name: str) -> None:
        body = V1Namespace(metadata=V1ObjectMeta(name=name))
        client.CoreV1Api(self.client()).create_namespace(body)

    def remove_namespace(self, name: str) -> None:
        """Returns when it is gone."""
        self.kubectl("delete", "namespace", name, "--wait", "--timeout=60s")

    def _write_access(self, port: int) -> None:
        cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
        access = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "admin"}}],
            "current-context": "it",
        }
        self.kubeconfig.write_text(yaml.safe_dump(access))

    def _start_etcd(self, port: int, peer: int) -> None:
        mine, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        flags = {
            "data-dir": self._folder / "etcd",
            "listen-client-urls": mine,
            "advertise-client-urls": mine,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
        }
        self._start("etcd", *_flags(flags))

    def _start_api_server(self, etcd: int, port: int) -> None:
        key, tokens = self._folder / "accounts.key", self._folder / "tokens.csv"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens.write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        flags = {
            "etcd-servers": f"http://127.0.0.1:{etcd}",
            "bind-address": "127.0.0.1",
            "secure-port": port,
            "cert-dir": self._folder / "certificates",
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            "service-account-issuer": "https://kubernetes.default.svc",
            "token-auth-file": tokens,
            "authorization-mode": "RBAC",
            "disable-admission-plugins": "ServiceAccount",
            "service-cluster-ip-range": "10.0.0.0/24",
            "endpoint-reconciler-type": "none",
        }
        self._start("kube-apiserver", *_flags(flags))

    def _manager_flags(self, port: int) -> Iterable[str]:
        flags = {
            "kubeconfig": self.kubeconfig,
            "controllers": CONTROLLERS,
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
            "secure-port": port,
            "cert-dir": self._folder / "manager",
        }
        return _flags(flags)

    def _await_api_server(self) -> None:
        deadline = time.monotonic() + START_S
        api = client.CoreV1Api(self.client())
        while True:
            try:
                api.read_namespace("default")
                return
            except (ApiException, urllib3.exceptions.HTTPError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _start(self, name: str, *flags: str) -> None:
        log = (self._folder / f"{name}.log").open("wb")
        self._logs.append(log)
        self._processes.append(subprocess.Popen([self._binaries / name, *flags], stdout=log, stderr=log))


def _flags(flags: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]
