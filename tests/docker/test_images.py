"""The Dockerfiles and the compose file, as far as reading them tells."""

import importlib.metadata
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from baton_cli.service_settings import settings_from
from baton_decode.settings import DecodeSettings
from baton_gateway.settings import GatewaySettings
from baton_prefill.settings import PrefillSettings

from ..helm.charts import CHART, case, chart, pods

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETTINGS = {"gateway": GatewaySettings, "prefill": PrefillSettings, "decode": DecodeSettings}

each = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, in lines of their own."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def of(path: Path, name: str) -> list[str]:
    return [rest for found, rest in instructions(path) if found == name]


def final_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[last:]


def test_there_is_a_dockerfile_for_each_image_of_the_chart():
    used = {
        spec["containers"][0]["image"].partition(":")[0]
        for name in ("cpu-demo", "h200-llama-8b")
        for _, _, spec in pods(case(name))
    }
    assert {image for image in used if image.startswith("baton/")} == {f"baton/{path.stem}" for path in DOCKERFILES}


@each
def test_bases_are_pinned_and_have_no_host(path):
    stages = of(path, "FROM")
    assert len(stages) == 2
    for stage in stages:
        assert re.fullmatch(r"[a-z]+:\d+\.\d+\.\d+-[a-z-]+( AS [a-z]+)?", stage)


@each
def test_nobody_is_root(path):
    stage = final_stage(path)
    users = [rest for name, rest in stage if name == "USER"]
    [(_, _, spec)] = [pod for pod in pods(case("defaults")) if pod[0] == "rel-baton-gateway"]
    security = spec["securityContext"]
    assert users == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    assert [name for name, _ in stage].index("USER") > [name for name, _ in stage].index("COPY")


@each
def test_sources_are_there_and_come_from_here(path):
    assert not of(path, "ADD")
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for copy in of(path, "COPY"):
        if not copy.startswith("--from="):
            *sources, _ = copy.split()
            for source in sources:
                assert (ROOT / source).exists()
                assert source in kept
    assert [copy for copy in of(path, "COPY") if copy.startswith("--from=")] == ["--from=build /opt /opt"]


@each
def test_what_starts_is_there(path):
    [entrypoint] = of(path, "ENTRYPOINT")
    [command] = json.loads(entrypoint)
    assert command in PROJECT["scripts"]
    [default] = of(path, "CMD")
    assert json.loads(default)[0] in SETTINGS
    assert not of(path, "HEALTHCHECK")  # Kubernetes asks the pods itself
    [environment] = [rest for name, rest in final_stage(path) if name == "ENV"]
    assert "PATH=/opt/venv/bin:" in environment
    assert "HOME=/tmp" in environment


@each
def test_labels_and_versions(path):
    [labels] = of(path, "LABEL")
    for label in ("title", "description", "version", "revision", "licenses"):
        assert f'org.opencontainers.image.{label}="' in labels
    assert f"VERSION={PROJECT['version']}" in of(path, "ARG")


@each
def test_installs_are_pinned_and_the_extra_is_the_image_s(path):
    installs = [rest for rest in of(path, "RUN") if " install -c " in rest or "pip install" in rest]
    assert installs
    assert all("-c constraints.txt" in install for install in installs)
    extra = "gateway" if path.stem == "gateway" else "worker"
    assert installs[-1].endswith(f"'.[{extra}]'")
    assert extra in PROJECT["optional-dependencies"]


@each
def test_the_demo_model_is_where_the_chart_looks(path):
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    assert "/opt/baton/demo-model" in helpers
    assert any("baton_demo.MODEL_DIR" in rest and rest.endswith("/opt/baton/demo-model") for rest in of(path, "RUN"))


def test_the_gateway_s_image_has_no_torch():
    brought = _closure("gateway")
    assert brought >= {"fastapi", "kubernetes", "redis", "tokenizers"}
    assert not brought & {"torch", "triton", "numpy", "transformers", "safetensors"}


def test_what_the_gateway_s_image_leaves_out_is_there_to_be_left_out():
    [removal] = [rest for rest in of(DOCKER / "gateway.Dockerfile", "RUN") if "rm -r" in rest]
    folders = removal.partition("rm -r ")[2].partition("&&")[0].split()
    provided = importlib.metadata.packages_distributions()
    brought = _closure("gateway")
    for folder in folders:
        assert {_normal(name) for name in provided[folder.partition("/")[0]]} <= brought, folder


def _closure(extra: str) -> set[str]:
    """Return the distributions that an installation of Baton brings, by normalized name."""
    found: set[str] = set()
    wanted = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra])]
    while wanted:
        requirement = wanted.pop()
        if (name := _normal(requirement.name)) not in found:
            found.add(name)
            wanted += _requirements(requirement.name, requirement.extras)
    return found


def _requirements(name: str, extras: set[str]) -> Iterator[Requirement]:
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
            yield requirement


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    return services


def test_compose_starts_what_it_can():
    services = _services()
    assert set(services) == {"gateway", "prefill", "decode"}
    for name, service in services.items():
        binary, *args = service["command"]
        assert binary == name
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).resolve() in DOCKERFILES
        assert service["image"].endswith(f":{PROJECT['version']}")
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        args = [arg for arg in args if not arg.startswith("--model=")]  # it is in the image only
        if name == "gateway":
            args.append(f"--model={ROOT}")
            gateway: Any = settings_from(args, GatewaySettings, "baton gateway")
            assert gateway.decode_addresses == ["decode:50051"]
            assert gateway.prefill_addresses == ["prefill:50051"]
        else:
            settings: Any = settings_from([*args, "--model=/x"], SETTINGS[name], f"baton {name}")
            assert settings.port == 50051


def test_the_chart_s_version_is_the_images():
    assert chart().metadata["appVersion"] == PROJECT["version"]
