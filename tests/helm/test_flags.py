"""The chart and the binaries agree on settings and on the fields of the files between them."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
import yaml
from pydantic_settings import BaseSettings

from baton_cli.service_settings import settings_from
from baton_controller.settings import ControllerSettings
from baton_decode.settings import DecodeSettings
from baton_gateway.models.models_file import ModelSpec, PoolSpec, PublishedMessage, PublishedPrefix
from baton_gateway.settings import GatewaySettings
from baton_gateway.tenancy.tenants import read_tenants
from baton_prefill.settings import PrefillSettings

from .charts import CASES, COMMIT, Manifest, case, chart, flags, named, pods, render

BINARIES: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "controller": ControllerSettings,
}

# Settings that the chart gives in another way than by a flag.
IN_MODELS_FILE = {
    *("model", "served-model-name", "decode-addresses", "prefill-addresses", "chat-template", "use-generation-config")
}
FROM_SECRETS = {"api-keys", "redis-url"}
OUT_OF_KUBERNETES = {"canary-file"}


def field_flags(binary: str) -> dict[str, Any]:
    """Return the fields of a binary's settings by their flags."""
    return {name.replace("_", "-"): field for name, field in BINARIES[binary].model_fields.items()}


def baton_containers(name: str) -> list[Manifest]:
    return [spec["containers"][0] for _, _, spec in pods(case(name)) if "args" in spec["containers"][0]]


def parsed(container: Manifest) -> Any:
    """Return the settings that a binary would have."""
    binary = container["args"][0]
    return settings_from(container["args"][1:], BINARIES[binary], f"baton {binary}")


@pytest.mark.parametrize("name", CASES)
def test_every_flag_is_one_of_the_binary_s(name):
    seen = set()
    for container in baton_containers(name):
        binary = container["args"][0]
        seen.add(binary)
        given = {flag for flag, value in flags(container).items() if value is not None}
        switches = {flag.removeprefix("no-") for flag, value in flags(container).items() if value is None}
        assert given | switches <= set(field_flags(binary))
        parsed(container)
    assert seen >= {"gateway", "decode"}


def test_settings_arrive_as_values_say_them():
    [prefill] = [
        c for c in baton_containers("everything") if c["args"][0] == "prefill" and "--revision=v2" in c["args"]
    ]
    settings = parsed(prefill)
    assert settings.model == Path(f"/models/large/models--acme--Large-1.0/snapshots/{COMMIT}")
    assert settings.served_model_name == "acme/Large"
    assert settings.max_model_len == 1_048_576
    assert settings.enable_prefix_caching is False
    assert settings.drain_seconds == 45
    assert settings.log_level == "debug"
    assert (settings.host, settings.port, settings.kv_port) == ("0.0.0.0", 50051, 50052)
    assert settings.peer_tls_name == "rel-baton-peer.ns"
    assert settings.peer_tls_ca_file == Path("/etc/baton-peer-tls/ca.crt")
    [gateway] = [c for c in baton_containers("everything") if c["args"][0] == "gateway"]
    settings = parsed(gateway)
    assert settings.prefix_index_entries == 5_000_000
    assert settings.ttft_slo_s == 7.5
    assert settings.local_prefill is False
    assert settings.shutdown_grace_s == 45
    assert settings.drain_delay_s == 25


def test_pairs_are_not_tried_where_their_ports_are_closed():
    values = {"models": {"a": {"prefill": {"gpus": 1}, "decode": {"gpus": 1}}}}
    for pairs, transport in ((False, "tcp"), (True, "auto")):
        manifests = render({**values, "gpuPairs": {"enabled": pairs}})
        [decode] = [
            spec["containers"][0] for _, _, spec in pods(manifests) if spec["containers"][0]["name"] == "decode"
        ]
        assert parsed(decode).kv_transport == transport
        [prefill] = [
            spec["containers"][0] for _, _, spec in pods(manifests) if spec["containers"][0]["name"] == "prefill"
        ]
        # No memory is reserved for GPU pairs either.
        none = {"name": "BATON_GPU_PAIR_MEMORY", "value": "0"}
        assert (none in prefill.get("env", [])) == (not pairs)
        assert none not in decode.get("env", [])
    pairs = {"gpuPairs": {"enabled": True, "unencrypted": True}}
    [decode] = [
        spec["containers"][0]
        for _, _, spec in pods(render({**values, **pairs, "peerTls": {"enabled": True, "existingSecret": "peers"}}))
        if spec["containers"][0]["name"] == "decode"
    ]
    assert parsed(decode).kv_transport == "nccl"
    values["models"]["a"]["decode"]["engine"] = {"kv-transport": "grpc"}
    [decode] = [
        spec["containers"][0] for _, _, spec in pods(render(values)) if spec["containers"][0]["name"] == "decode"
    ]
    assert parsed(decode).kv_transport == "grpc"


def _forbidden(*path: str) -> set[str]:
    """Return the flags that the schema leaves to the chart."""
    schema = chart().schema
    for key in path:
        assert schema is not None
        schema = schema[key]
    assert schema is not None
    return {flag for flag, allowed in schema["properties"].items() if allowed is False}


def _another(field: Any) -> Any:
    """Return a value that is not the field's default."""
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return next(value for value in get_args(field.annotation) if value != field.default)
    if bool in kinds:
        return not field.default
    if int in kinds:
        return 1 if field.default != 1 else 2
    if float in kinds:
        return 0.25
    return "/x" if Path in kinds else "x"


@pytest.mark.parametrize("binary", BINARIES)
def test_every_setting_can_be_reached_from_values(binary):
    of_its_own = binary in ("gateway", "controller")
    forbidden = _forbidden(*(("properties", binary, "properties", "settings") if of_its_own else ("$defs", "engine")))
    # The chart sets these itself, or other values determine them.
    used = {flag for container in baton_containers("everything") for flag in flags(container)}
    assert forbidden <= used | IN_MODELS_FILE | FROM_SECRETS | OUT_OF_KUBERNETES
    wanted = {flag: _another(field) for flag, field in field_flags(binary).items() if flag not in forbidden}
    if of_its_own:
        values: dict[str, Any] = {
            binary: {"settings": wanted},
            "models": {"a": {"prefill": {}, "scaler": {"enabled": True}}},
        }
    else:
        values = {"models": {"a": {"prefill": {}, binary: {"engine": wanted}}}}
    [container] = [
        spec["containers"][0] for _, _, spec in pods(render(values)) if spec["containers"][0]["name"] == binary
    ]
    settings = parsed(container)
    for flag, value in wanted.items():
        found = getattr(settings, flag.replace("-", "_"))
        assert (str(found) if isinstance(found, Path) else found) == value, flag


def test_the_models_file_has_the_fields_that_gateways_read():
    manifest = named(case("everything"), "ConfigMap", "rel-baton-gateway")
    models = yaml.safe_load(manifest["data"]["models.yaml"])["models"]
    pool_fields = {field.name for field in msgspec.structs.fields(PoolSpec)} | {"selector"}
    for model in models:
        assert set(model) <= {field.name for field in msgspec.structs.fields(ModelSpec)}
        assert all(set(pool) <= pool_fields for pool in model["pools"])
    [large] = [model for model in models if model["name"] == "acme/Large"]
    folder = f"/models/large/models--acme--Large-1.0/snapshots/{COMMIT}"
    assert large["chat_template"] == f"{folder}/other.jinja"
    assert large["use_generation_config"] is False
    assert msgspec.convert(large["published_prefixes"], tuple[PublishedPrefix, ...]) == (
        PublishedPrefix(messages=(PublishedMessage(role="system", content="You are Acme's assistant."),)),
        PublishedPrefix(text="Translate:\n"),
    )
    assert large["special_tokens_in_content"] == "reject"
    assert (large["tool_call_parser"], large["reasoning_parser"]) == ("glm", "think")
    base = "app.kubernetes.io/instance=rel,baton.dev/model=large,baton.dev/pool"
    assert large["pools"] == [
        {"name": "long", "selector": f"{base}=long", "tenants": ["acme"]},
        {"name": "short", "selector": f"{base}=short", "max_prompt_tokens": 2000},
        {"name": "default", "selector": f"{base}=default"},
    ]
    assert [model["folder"] for model in models] == ["/models/disk", folder, "/models/small"]


def test_selectors_of_pools_find_the_services_of_both_revisions():
    models = yaml.safe_load(named(case("everything"), "ConfigMap", "rel-baton-gateway")["data"]["models.yaml"])[
        "models"
    ]
    services = [manifest["metadata"] for manifest in case("everything") if manifest["kind"] == "Service"]
    found = {
        (model["name"], pool["name"]): sorted(
            service["name"] for service in services if _fits(pool["selector"], service)
        )
        for model in models
        for pool in model["pools"]
    }
    assert found == {
        ("disk", "default"): ["rel-baton-disk-decode", "rel-baton-disk-decode-canary"],
        ("acme/Large", "default"): [
            *("rel-baton-large-decode", "rel-baton-large-decode-v2"),
            *("rel-baton-large-prefill", "rel-baton-large-prefill-v2"),
        ],
        ("acme/Large", "long"): ["rel-baton-large-long-decode"],
        ("acme/Large", "short"): ["rel-baton-large-short-decode", "rel-baton-large-short-prefill"],
        ("small", "default"): ["rel-baton-small-decode", "rel-baton-small-prefill"],
    }


def _fits(selector: str, metadata: Manifest) -> bool:
    return all(metadata["labels"].get(key) == value for key, value in (term.split("=") for term in selector.split(",")))


def test_tenants_are_read_as_they_were_said(tmp_path):
    secret = named(case("everything"), "Secret", "rel-baton-tenants")
    (tmp_path / "tenants.yaml").write_text(secret["stringData"]["tenants.yaml"])
    found = read_tenants(tmp_path / "tenants.yaml")
    assert found.tenants["acme"].tokens_per_minute == 100_000_000
    assert found.tenants["acme"].weight == 2.5
    assert [key.id for key in found.keys] == ["0a1b2c3d"]
