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
_PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = _PYPROJECT["project"], _PYPROJECT["build-system"]["requires"]
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
    """The tag says to people what the digest, which is what counts, is of. All stages have one base."""
    stages = of(path, "FROM")
    assert len(stages) == 2
    for stage in stages:
        assert re.fullmatch(r"[a-z]+:\d+\.\d+\.\d+-[a-z-]+@sha256:[0-9a-f]{64}( AS [a-z]+)?", stage)
    assert {stage.partition(" ")[0] for other in DOCKERFILES for stage in of(other, "FROM")} == {stages[1]}


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
def test_installs_are_by_hash_and_the_lock_is_the_image_s(path):
    """All but Baton itself, which is built and installed without an index to fall back to."""
    parts = [part for rest in of(path, "RUN") for part in rest.split("&&")]
    commands = [part.split() for part in parts if re.search(r"\bpip .*\b(install|wheel) ", part)]
    assert [command[-1] for command in commands] == [
        "docker/requirements/build.txt",
        f"docker/requirements/{path.stem}.txt",
        ".",
        "/wheels/*.whl",
    ]
    for command in commands:
        wanted = {"--require-hashes", "--only-binary"} if "-r" in command else {"--no-deps", "--no-index"}
        assert wanted <= set(command)
    assert "--no-build-isolation" in commands[2]


def locked(name: str) -> dict[str, tuple[Requirement, list[str]]]:
    """Return what a lock file pins, with the hashes, by normalized name."""
    text = re.sub(r"\s*\\\n\s*", " ", (DOCKER / "requirements" / f"{name}.txt").read_text())
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pin, *hashes = line.split(" --hash=")
            requirement = Requirement(pin)
            assert _normal(requirement.name) not in found
            found[_normal(requirement.name)] = requirement, hashes
    return found


def version(requirement: Requirement) -> str:
    [pin] = requirement.specifier
    assert pin.operator == "=="
    return pin.version


LOCKS = ["build", *(path.stem for path in DOCKERFILES)]


@pytest.mark.parametrize("name", LOCKS)
def test_locks_have_hashes_and_no_host(name):
    for requirement, hashes in locked(name).values():
        assert hashes
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes)
        assert requirement.url is None
    assert "://" not in (DOCKER / "requirements" / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", LOCKS)
def test_locks_have_the_versions_of_constraints_txt(name):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {_normal(line.partition("==")[0]): line.partition("==")[2] for line in lines if not line.startswith("#")}
    for package, (requirement, _) in locked(name).items():
        if not package.startswith(CUDA):  # CI runs on CPU and has none of these
            assert version(requirement).removesuffix("+cpu") == pins[package]


CUDA = ("nvidia-", "cuda-")
EXTRAS = {"gateway": ["gateway"], "worker-cpu": ["worker"], "worker-cuda": ["worker", "gpu"]}


def test_locks_have_what_the_extras_need_and_no_more():
    for name, extras in EXTRAS.items():
        brought = {package for package in locked(name) if not package.startswith(CUDA)}
        assert brought == set().union(*map(_closure, extras))
    cuda = set(locked("worker-cuda"))
    assert any(package.startswith(CUDA) for package in cuda)
    assert version(locked("worker-cpu")["torch"][0]).endswith("+cpu")
    assert cuda >= {"torch", "triton"}
    assert not [package for package in locked("worker-cpu") if package.startswith(CUDA) or package == "triton"]
    assert set(locked("build")) == {"setuptools"}


@pytest.mark.parametrize(("name", "extra"), [(name, extra) for name, extras in EXTRAS.items() for extra in extras])
def test_locks_are_within_the_ranges_of_the_project(name, extra):
    pins = locked(name)
    for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]):
        wanted = Requirement(text)
        if _normal(wanted.name) in pins:
            assert wanted.specifier.contains(version(pins[_normal(wanted.name)][0])), text
    [build] = [Requirement(text) for text in BUILD]
    assert build.specifier.contains(version(locked("build")[build.name][0]))


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
