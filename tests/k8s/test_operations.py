"""The gateway and the chart accept the files and values that OPERATIONS.md shows."""

import copy
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_gateway.tenancy.keys import Key
from baton_gateway.tenancy.tenants import Tenant, read_tenants

from ..helm.charts import CHART, RELEASE, ROOT, Values, chart, containers, flags, named, render

PAGE = (ROOT / "k8s" / "OPERATIONS.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def block(text: str, language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert isinstance(found, str)
    return found


@pytest.fixture
def tenants_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(block(section("Tenants"), "yaml"))
    return path


def test_the_first_tenants_file_has_all_fields_and_is_read(tenants_file: Path) -> None:
    written = yaml.safe_load(tenants_file.read_text())
    assert list(written["tenants"]["acme"]) == list(Tenant.__struct_fields__)
    tenants = read_tenants(tenants_file).tenants
    assert set(tenants) == {"acme", "batch"}
    for field, value in written["tenants"]["acme"].items():
        assert getattr(tenants["acme"], field) == value


@pytest.mark.processes
def test_the_commands_make_a_secret_that_the_chart_mounts(tenants_file: Path) -> None:
    lines = [shlex.split(line) for line in block(section("Tenants"), "bash").splitlines()]
    [baton], [kubectl], [helm] = ([line for line in lines if line[0] == name] for name in ("baton", "kubectl", "helm"))
    done = subprocess.run(
        [sys.executable, "-m", "baton_cli", *baton[1:]],
        cwd=tenants_file.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    [key] = read_tenants(tenants_file).keys
    assert isinstance(key, Key)
    assert key.tenant == "acme"
    assert key.fits(done.stdout.strip())

    # kubectl names the key of the Secret after the file.
    secret, source = kubectl[kubectl.index("generic") + 1], kubectl[kubectl.index("--from-file") + 1]
    name, _, value = helm[helm.index("--set") + 1].partition("=")
    assert (name, value) == ("tenants.existingSecret", secret)
    gateway = named(render({"tenants": {"existingSecret": value}}), "Deployment", f"{RELEASE}-baton-gateway")
    pod = gateway["spec"]["template"]["spec"]
    mounted = [
        (item["path"], item["key"], volume["name"])
        for volume in pod["volumes"]
        for projected in volume.get("projected", {}).get("sources", ())
        if projected.get("secret", {}).get("name") == secret
        for item in projected["secret"]["items"]
    ]
    [(path, key_of_secret, volume)] = mounted
    assert key_of_secret == source
    [container] = containers(pod)
    [folder] = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == volume]
    assert flags(container)["tenants-file"] == f"{folder}/{path}"


def claim(persistence: dict[str, Any]) -> list[Any]:
    manifests = render({"redis": {"enabled": True, "persistence": persistence}})
    spec = named(manifests, "StatefulSet", f"{RELEASE}-baton-redis")["spec"]
    templates = spec.get("volumeClaimTemplates", [])
    assert bool(templates) != any("emptyDir" in v for v in spec["template"]["spec"]["volumes"] if v["name"] == "data")
    assert isinstance(templates, list)
    return templates


def test_the_volume_of_redis_is_as_described() -> None:
    text = section("Redis")
    [data] = claim({})
    assert f"`{data['metadata']['name']}-baton-redis-0`" in text
    assert "".join(data["spec"]["accessModes"]) in text
    assert f"({data['spec']['resources']['requests']['storage']})" in text
    assert "storageClassName" not in data["spec"]
    [fast] = claim({"storageClassName": "fast"})
    assert fast["spec"]["storageClassName"] == "fast"
    assert claim({"enabled": False}) == []


def test_values_that_are_named_exist() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    names = {name.partition("=")[0] for name in re.findall(r"`((?:redis|tenants|tests|worker)\.[\w.=]+)`", PAGE)}
    assert len(names) > 8
    for name in names - {"tenants.yaml"}:
        node = values
        for part in name.split("."):
            assert part in node, name
            node = node[part]


def first_day(language: str) -> str:
    """Return all blocks of one language in the section, one after the other, with continued lines joined."""
    blocks = re.findall(rf"```{language}\n(.*?)```", section("The first day"), re.DOTALL)
    assert blocks
    return "".join(blocks).replace("\\\n", " ")


def first_day_releases() -> list[Values]:
    """Return the values of each revision that the first day installs."""
    releases: list[Values] = []
    for line in first_day("bash").splitlines():
        words = shlex.split(line)
        if words[:2] not in (["helm", "install"], ["helm", "upgrade"]):
            continue
        assert words[2:4] == ["baton", "helm/baton"]
        assert ("--reuse-values" in words) == bool(releases)
        values = copy.deepcopy(releases[-1]) if releases else {}
        for option, argument in itertools.pairwise(words):
            if option == "--values":
                values = yaml.safe_load((ROOT / argument).read_text())
            elif option == "--set":
                path, _, value = argument.partition("=")
                *parents, last = path.split(".")
                node = values
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[last] = yaml.safe_load(value)
        releases.append(values)
    return releases


def test_the_chart_takes_each_upgrade_of_the_first_day() -> None:
    """Its schema refuses values that do not exist, and each object that a command names is rendered."""
    rendered = [chart().render(values, name="baton", namespace="baton") for values in first_day_releases()]
    assert len(rendered) == 5
    manifests = [
        manifest
        for name, text in rendered[3].items()
        if name.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]
    objects = {f"{manifest['kind'].lower()}/{manifest['metadata']['name']}" for manifest in manifests}
    commands = first_day("bash").replace("deploy/", "deployment/").replace("configmap ", "configmap/")
    named_objects = set(re.findall(r"(?:service|deployment|configmap)/baton[\w-]*", commands))
    assert named_objects == {"service/baton-gateway", "deployment/baton-gateway", "configmap/baton-canary-override"}
    assert named_objects <= objects
    [selector] = re.findall(r"--selector ([\w./-]+)=(\w+)", commands)
    labels = [m["spec"]["template"]["metadata"]["labels"] for m in manifests if m["kind"] == "Deployment"]
    assert sum(label.get(selector[0]) == selector[1] for label in labels) == 2


def test_the_first_tenant_can_be_read_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(first_day("yaml"))
    limit = read_tenants(path).tenants["acme"].requests_per_minute
    assert limit == 3
    [old, new] = re.findall(r"sed -i 's/(.+?)/(.+?)/' tenants.yaml", first_day("bash"))[0]
    path.write_text(path.read_text().replace(old, new))
    assert read_tenants(path).tenants["acme"].requests_per_minute > 20 > limit


def test_the_values_for_a_model_from_a_hub_render() -> None:
    values = yaml.safe_load(block(section("Models from a hub"), "yaml"))
    gateway = named(render(values), "Deployment", f"{RELEASE}-baton-gateway")
    [init] = gateway["spec"]["template"]["spec"]["initContainers"]
    assert init["args"][2].startswith("Qwen/Qwen3-0.6B@")
