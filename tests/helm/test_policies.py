"""Properties that every object of the release must have for all values."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from .charts import CASES, Manifest, case, containers, flags, named, of_kind, pods, render, selects, workloads

# Secrets, claims and others that a case's values expect to exist already.
OUTSIDE = {
    "pull",
    "hub",
    "keys",
    "test-key",
    "llm-tls",
    "peer-tokens",
    "redis-url",
    "tenants",
    "tls",
    "redis",
    "models",
    "other",
    "peers",
}

all_cases = pytest.mark.parametrize("name", CASES)


@all_cases
def test_pods_are_restricted(name):
    """The restricted Pod Security Standard, a read-only root, and no more of the API than needed."""
    for pod, _, spec in pods(case(name)):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), pod
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        has_token = pod.endswith(("-gateway", "-controller"))
        assert spec["automountServiceAccountToken"] is has_token, pod
        for container in containers(spec):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "runAsUser"} & set(context)


@all_cases
def test_images_have_tags_and_containers_bounds(name):
    for pod, _, spec in pods(case(name)):
        for container in containers(spec):
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            assert tag, pod
            assert tag != "latest"
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(container["resources"][kind]), pod
        for volume in spec.get("volumes", ()):
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"], pod


@all_cases
def test_images_are_the_registry_s(name):
    """The allowed images are ours and Redis's. The values choose a model's image."""
    registry = CASES[name].get("image", {}).get("registry", "")
    for _, _, spec in pods(case(name)):
        for container in containers(spec):
            if not container["image"].startswith("models/"):
                assert re.fullmatch(
                    rf"{registry}(baton/[a-z-]+:[0-9a-z.-]+|redis:\d+\.\d+\.\d+-[a-z]+@sha256:[0-9a-f]{{64}})",
                    container["image"],
                )


@all_cases
def test_gpus_and_images_agree(name):
    for _, _, spec in pods(case(name)):
        [container] = spec["containers"]
        limits = container["resources"]["limits"]
        if container["name"] in ("prefill", "decode"):
            cuda = "worker-cuda" in container["image"]
            assert cuda == ("nvidia.com/gpu" in limits)
            assert flags(container)["device"] == ("cuda" if cuda else "cpu")
        else:
            assert "nvidia.com/gpu" not in limits


@all_cases
def test_long_running_containers_have_probes_that_reach_a_port(name):
    for workload in workloads(case(name)):
        for container in workload["spec"]["template"]["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container[kind]
                # A grpc probe is not possible, because it has no certificate.
                [how] = {"httpGet", "exec"} & set(probe)
                if how == "httpGet":
                    assert probe["httpGet"]["port"] in ports
                    assert probe["httpGet"]["path"] in ("/live", "/ready")


@all_cases
def test_a_pod_may_finish_before_it_is_killed(name):
    drain_s = CASES[name].get("drainSeconds", 60)
    for workload in workloads(case(name)):
        spec = workload["spec"]["template"]["spec"]
        [container] = spec["containers"]
        if container["name"] not in ("gateway", "prefill", "decode"):
            continue
        given = flags(container)
        if container["name"] == "gateway":
            assert given["shutdown-grace-s"] == str(drain_s)
            sleep_s = int(given["drain-delay-s"] or 0)
            assert sleep_s > 0
        else:
            sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert given["drain-seconds"] == str(drain_s)
        assert spec["terminationGracePeriodSeconds"] >= sleep_s + drain_s + 3


@all_cases
def test_every_workload_has_a_budget_and_a_service(name):
    manifests = case(name)
    for workload in workloads(manifests):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert selects(workload["spec"]["selector"], labels)
        budgets = [pdb for pdb in of_kind(manifests, "PodDisruptionBudget") if selects(pdb["spec"]["selector"], labels)]
        assert len(budgets) == 1
        assert budgets[0]["spec"]["maxUnavailable"] == 1
        assert any(service["spec"]["selector"].items() <= labels.items() for service in of_kind(manifests, "Service"))


@all_cases
def test_selectors_tell_workloads_apart(name):
    manifests = case(name)
    every = workloads(manifests)
    for workload in every:
        chosen = [
            other["metadata"]["name"]
            for other in every
            if selects(workload["spec"]["selector"], other["spec"]["template"]["metadata"]["labels"])
        ]
        assert chosen == [workload["metadata"]["name"]]


@all_cases
def test_services_reach_ports_that_are_there(name):
    manifests = case(name)
    for service in of_kind(manifests, "Service"):
        behind = [spec for _, labels, spec in pods(manifests) if service["spec"]["selector"].items() <= labels.items()]
        assert len(behind) == 1, service["metadata"]["name"]
        ports = {port["name"]: port["containerPort"] for port in behind[0]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if service["spec"].get("clusterIP") == "None":  # no proxy that would translate
                assert port["port"] == ports[port["targetPort"]]


@all_cases
def test_worker_services_carry_the_labels_of_discovery(name):
    manifests = case(name)
    keys = ["model", "pool", "role", "revision"]
    for workload in workloads(manifests):
        pod_labels = workload["spec"]["template"]["metadata"]["labels"]
        if "baton.dev/model" not in pod_labels:
            continue
        service = named(manifests, "Service", workload["metadata"]["name"])
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        for labels in (service["metadata"]["labels"], pod_labels):
            assert [labels[f"baton.dev/{key}"] for key in keys] == [pod_labels[f"baton.dev/{key}"] for key in keys]
            assert labels["app.kubernetes.io/name"] == "baton"
            assert labels["app.kubernetes.io/instance"] == "rel"
            assert labels["app.kubernetes.io/component"] == labels["baton.dev/role"]


@all_cases
def test_the_admin_service_leads_to_gateways_that_run(name):
    # With publishNotReadyAddresses, DNS and the API server's proxy would also return pods that have ended.
    manifests = case(name)
    for workload in workloads(manifests):
        if workload["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway":
            service = named(manifests, "Service", workload["metadata"]["name"] + "-admin")
            assert not service["spec"].get("publishNotReadyAddresses", False)


@all_cases
def test_references_resolve(name):
    manifests = case(name)
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    there |= {("Secret", certificate["spec"]["secretName"]) for certificate in of_kind(manifests, "Certificate")}
    for pod, _, spec in pods(manifests):
        assert ("ServiceAccount", spec["serviceAccountName"]) in there
        for kind, referred in _references(spec):
            assert (kind, referred) in there or referred in OUTSIDE, (pod, kind, referred)
    for issuer in of_kind(manifests, "Issuer"):
        assert "ca" not in issuer["spec"] or ("Secret", issuer["spec"]["ca"]["secretName"]) in there
    for certificate in of_kind(manifests, "Certificate"):
        issuer = certificate["spec"]["issuerRef"]
        assert (issuer["kind"], issuer["name"]) in there or issuer["name"] == "ca"
    for manifest in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        assert ("Deployment", manifest["spec"]["scaleTargetRef"]["name"]) in there
    for binding in of_kind(manifests, "RoleBinding"):
        assert ("Role", binding["roleRef"]["name"]) in there
        assert all(("ServiceAccount", subject["name"]) in there for subject in binding["subjects"])


def _references(node: Any) -> Iterator[tuple[str, str]]:
    """Yield what a pod's spec refers to, from projected volumes and variables too."""
    if isinstance(node, list):
        for item in node:
            yield from _references(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("configMap", "configMapKeyRef", "configMapRef"):
                yield "ConfigMap", value["name"]
            elif key in ("secret", "secretKeyRef", "secretRef"):
                yield "Secret", value.get("name") or value["secretName"]
            elif key == "persistentVolumeClaim":
                yield "PersistentVolumeClaim", value["claimName"]
            else:
                yield from _references(value)


@all_cases
def test_mounts_have_volumes_and_volumes_mounts(name):
    for workload in workloads(case(name)):
        spec = workload["spec"]["template"]["spec"]
        claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())]
        volumes = [volume["name"] for volume in spec["volumes"]] + claims
        assert len(volumes) == len(set(volumes))
        mounted = set()
        for container in containers(spec):
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(paths) == len(set(paths))
            mounted |= {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == set(volumes)
        # The root is read-only, so pods need a writable /tmp.
        assert "/tmp" in {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}


@all_cases
def test_monitors_find_every_pod_with_metrics(name):
    manifests = case(name)
    with_metrics = [
        (labels, pod)
        for pod, labels, spec in pods(manifests)
        if any(port["name"] == "metrics" for port in spec["containers"][0].get("ports", ()))
    ]
    for monitor in of_kind(manifests, "PodMonitor"):
        assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
        assert all(selects(monitor["spec"]["selector"], labels) for labels, _ in with_metrics)
    for monitor in of_kind(manifests, "ServiceMonitor"):
        [endpoint] = monitor["spec"]["endpoints"]
        scraped = [
            service["spec"]["selector"]
            for service in of_kind(manifests, "Service")
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
            and endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        ]
        for labels, pod in with_metrics:
            assert sum(selector.items() <= labels.items() for selector in scraped) == 1, pod


def _rules(manifests: tuple[Manifest, ...], account: str) -> set[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    return {
        (group, resource, tuple(rule.get("resourceNames", ())), tuple(rule["verbs"]))
        for rule in named(manifests, "Role", account)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@all_cases
def test_rights_are_exactly_those_that_are_needed(name):
    manifests = case(name)
    look = ("list", "watch")
    full = named(manifests, "Role", "rel-baton-gateway" if name != "bare" else _full(manifests) + "-gateway")
    prefix = full["metadata"]["name"].removesuffix("-gateway")
    values, status, override = (f"{prefix}-canary-{kind}" for kind in ("values", "status", "override"))
    assert _rules(manifests, f"{prefix}-gateway") == {
        ("discovery.k8s.io", "endpointslices", (), look),
        ("", "configmaps", (values, status, override), look),
    }
    roles = {role["metadata"]["name"] for role in of_kind(manifests, "Role")}
    assert not of_kind(manifests, "ClusterRole", "ClusterRoleBinding")
    if name == "everything":
        change = ("get", "patch")
        scaled = ("rel-baton-small-prefill", "rel-baton-small-decode")
        assert _rules(manifests, f"{prefix}-controller") == {
            ("discovery.k8s.io", "endpointslices", (), look),
            ("", "configmaps", (status,), change),
            ("", "configmaps", (override,), ("get",)),
            ("", "configmaps", (), ("create",)),
            ("apps", "deployments", (f"{prefix}-controller",), ("get",)),
            ("", "events", (), ("create",)),
            ("apps", "deployments/scale", scaled, change),
        }
    else:
        assert roles == {f"{prefix}-gateway"}
    bound = {subject["name"] for binding in of_kind(manifests, "RoleBinding") for subject in binding["subjects"]}
    assert bound == roles


def _full(manifests: tuple[Manifest, ...]) -> str:
    [name] = [
        role["metadata"]["name"].removesuffix("-gateway")
        for role in of_kind(manifests, "Role")
        if role["metadata"]["name"].endswith("-gateway")
    ]
    return str(name)


# The allowed connections, by component and port name.
ALWAYS = {
    ("gateway", "prefill", "grpc"),
    ("gateway", "decode", "grpc"),
    ("decode", "prefill", "grpc"),
    ("decode", "prefill", "kv"),
    ("test", "gateway", "http"),
}
WITH_REDIS = {("gateway", "redis", "redis")}
WITH_CONTROLLER = {("controller", other, "metrics") for other in ("gateway", "prefill", "decode")}
WITH_PAIRS = {
    (one, other, port)
    for one, other in (("prefill", "decode"), ("decode", "prefill"))
    for port in ("grpc", "kv", "metrics")
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("defaults", ALWAYS),
        ("h200-llama-8b", ALWAYS | WITH_REDIS | WITH_PAIRS),
        ("everything", ALWAYS | WITH_REDIS | WITH_PAIRS | WITH_CONTROLLER),
    ],
)
def test_network_policies_let_through_exactly_what_is_needed(name, expected):
    manifests = case(name)
    policies = of_kind(manifests, "NetworkPolicy")
    found = {(labels["app.kubernetes.io/component"], pod): (labels, spec) for pod, labels, spec in pods(manifests)}
    allowed = set()
    for (source, _), (source_labels, _) in found.items():
        for (target, _), (target_labels, target_spec) in found.items():
            for port in target_spec["containers"][0].get("ports", ()):
                out = _lets(policies, "Egress", source_labels, target_labels, port)
                into = _lets(policies, "Ingress", target_labels, source_labels, port)
                if out and into:
                    allowed.add((source, target, port["name"]))
    kv_of_decode = {
        edge for edge in allowed | expected if edge[1:] == ("decode", "kv")
    }  # decode pods have no such port
    assert allowed == expected - kv_of_decode


def _lets(
    policies: list[Manifest], direction: str, own: Mapping[str, str], peer: Mapping[str, str], port: Mapping[str, Any]
) -> bool:
    """Whether a pod's policies allow traffic with a pod of the same namespace."""
    mine = [policy["spec"] for policy in policies if selects(policy["spec"]["podSelector"], own)]
    assert any(direction in policy["policyTypes"] for policy in mine), own
    for policy in mine:
        for rule in policy.get(direction.lower(), ()):
            peers = rule.get("to" if direction == "Egress" else "from")
            ports = [entry["port"] for entry in rule.get("ports", ())]
            meets = peers is None or any("podSelector" in one and selects(one["podSelector"], peer) for one in peers)
            if meets and (not ports or port["containerPort"] in ports or port["name"] in ports):
                return True
    return False


@pytest.mark.parametrize("name", [name for name in CASES if name != "bare"])
def test_named_ports_of_policies_are_those_of_the_pods(name):
    manifests = case(name)
    for policy in of_kind(manifests, "NetworkPolicy"):
        chosen = [spec for _, labels, spec in pods(manifests) if selects(policy["spec"]["podSelector"], labels)]
        if policy["metadata"]["labels"].get("app.kubernetes.io/component") != "prefill":
            assert chosen, policy["metadata"]["name"]
        for rule in policy["spec"].get("ingress", ()):
            for entry in rule.get("ports", ()):
                for spec in chosen:
                    assert entry["port"] in [port["name"] for port in spec["containers"][0]["ports"]]


def test_strangers_come_in_where_values_say():
    manifests = case("defaults")
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}]
    prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    by_port: dict[str, list[Any]] = {}
    for policy in of_kind(manifests, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            strangers = [peer for peer in rule["from"] if "podSelector" not in peer]
            for entry in rule["ports"]:
                by_port.setdefault(entry["port"], []).extend(strangers)
    assert by_port["http"] == clients
    assert by_port["metrics"] == prometheus * 3
    assert by_port["grpc"] == by_port["kv"] == []


def test_the_collector_is_reached_where_values_say():
    def senders(name: str) -> list[str]:
        wanted = {"to": CASES["everything"]["networkPolicy"]["collector"]}
        found = [
            policy for policy in of_kind(case(name), "NetworkPolicy") if wanted in policy["spec"].get("egress", ())
        ]
        return [policy["metadata"]["labels"]["app.kubernetes.io/component"] for policy in found]

    assert senders("defaults") == []
    assert senders("everything") == ["gateway", "prefill", "decode"]


def test_no_list_of_peers_is_empty():
    """Kubernetes takes an empty list of peers as all sources."""
    nobody = {"networkPolicy": {"clients": [], "prometheus": [], "dns": [], "collector": []}}
    for values in (nobody, {**CASES["everything"], **nobody}):
        for policy in of_kind(render(values), "NetworkPolicy"):
            for direction, peers in (("ingress", "from"), ("egress", "to")):
                assert all(rule.get(peers) != [] for rule in policy["spec"].get(direction, ()))
                assert policy["spec"].get(direction) != []


@all_cases
def test_all_pods_that_speak_with_each_other_have_tls_or_none(name):
    """Pods check one DNS name, which the certificate contains."""
    manifests = case(name)
    said = []
    for _, _, spec in pods(manifests):
        [container] = spec["containers"]
        if container["name"] not in ("gateway", "prefill", "decode"):
            continue
        given = {flag: value for flag, value in flags(container).items() if flag.startswith("peer-tls")}
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        secrets = {volume["name"]: volume.get("secret") for volume in spec["volumes"]}
        if given:
            mount = mounts["/etc/baton-peer-tls"]
            assert mount["readOnly"] is True
            given["secret"] = secrets[mount["name"]]["secretName"]
        assert ("peer-tls" in secrets) == bool(given)
        said.append(given)
    assert all(given == said[0] for given in said)
    assert bool(said[0]) == CASES[name].get("peerTls", {}).get("enabled", False)
    for certificate in of_kind(manifests, "Certificate"):
        if certificate["spec"]["secretName"] == said[0].get("secret"):
            assert certificate["spec"]["dnsNames"] == [said[0]["peer-tls-name"]]
            assert {"server auth", "client auth"} <= set(certificate["spec"]["usages"])


@all_cases
def test_peers_share_one_token_and_nobody_else_has_it(name):
    manifests, values = case(name), CASES[name]
    existing = values.get("peerToken", {}).get("existingSecret", "")
    tls = values.get("peerTls", {}).get("enabled", False)
    made = [manifest for manifest in of_kind(manifests, "Secret") if "tokens" in manifest["stringData"]]
    secret = existing or (made[0]["metadata"]["name"] if made else None)
    assert bool(made) == (not tls and not existing)
    assert (secret is None) == (tls and not existing)
    for pod, labels, spec in pods(manifests):
        volumes = [volume["secret"] for volume in spec.get("volumes", ()) if volume["name"] == "peer-token"]
        container = spec["containers"][0]
        mounts = [mount for mount in container.get("volumeMounts", ()) if mount["name"] == "peer-token"]
        if secret is None or labels.get("app.kubernetes.io/component") not in ("gateway", "prefill", "decode"):
            assert not volumes, pod
            assert not mounts, pod
            continue
        assert [volume["secretName"] for volume in volumes] == [secret]
        # 0440: readable only by the owner and by the group of the pod's user.
        assert volumes[0]["defaultMode"] == 0o440
        assert spec["securityContext"]["fsGroup"]
        assert [mount["readOnly"] for mount in mounts] == [True]
        assert flags(container)["peer-token-file"] == f"{mounts[0]['mountPath']}/{volumes[0]['items'][0]['path']}"


def test_the_token_of_peers_is_random_and_in_its_secret_only():
    manifests = render({})
    tokens = named(manifests, "Secret", "rel-baton-peer-token")["stringData"]["tokens"]
    assert re.fullmatch(r"[A-Za-z0-9]{43}", tokens)
    assert tokens != named(render({}), "Secret", "rel-baton-peer-token")["stringData"]["tokens"]
    assert tokens not in str([manifest for manifest in manifests if manifest["kind"] != "Secret"])


def test_pods_need_no_token_where_values_say_so():
    manifests = render({"peerToken": {"enabled": False}})
    assert not of_kind(manifests, "Secret")
    assert "peer-token" not in str(manifests)


def test_no_secret_stands_in_a_command_line_or_a_config_map():
    manifests = case("everything")
    secret = named(manifests, "Secret", "rel-baton-redis")["stringData"]
    assert secret["url"] == f"redis://:{secret['password']}@rel-baton-redis:6379/0"
    assert len(secret["password"]) == 32
    others = [manifest for manifest in manifests if manifest["kind"] != "Secret"]
    assert secret["password"] not in str(others)
