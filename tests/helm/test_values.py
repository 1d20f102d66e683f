"""The effect of values on the rendered objects."""

import json

import pytest
import yaml

from baton_controller.config_file import read_config

from .charts import CASES, COMMIT, case, containers, flags, named, of_kind, render, workloads


def test_without_models_the_demo_model_is_served():
    manifests = case("defaults")
    names = [workload["metadata"]["name"] for workload in workloads(manifests)]
    assert names == ["rel-baton-gateway", "rel-baton-demo-prefill", "rel-baton-demo-decode"]
    [container] = named(manifests, "Deployment", "rel-baton-demo-decode")["spec"]["template"]["spec"]["containers"]
    assert flags(container)["model"] == "/opt/baton/demo-model"
    assert container["image"] == "baton/worker-cpu:0.1.0"


def test_presets_have_the_pods_that_they_promise():
    replicas = {
        name: {workload["metadata"]["name"]: workload["spec"].get("replicas") for workload in workloads(case(name))}
        for name in ("cpu-demo", "single-gpu", "h200-llama-8b")
    }
    assert replicas == {
        "cpu-demo": {"rel-baton-gateway": 1, "rel-baton-demo-prefill": 1, "rel-baton-demo-decode": 1},
        "single-gpu": {"rel-baton-gateway": 2, "rel-baton-qwen3-0-6b-decode": 1},
        "h200-llama-8b": {
            "rel-baton-gateway": 2,
            "rel-baton-llama-8b-prefill": 2,
            "rel-baton-llama-8b-decode": 2,
            "rel-baton-redis": 1,
        },
    }


def test_a_canary_is_a_second_pair_with_what_it_overrides():
    manifests = case("everything")
    for role in ("prefill", "decode"):
        stable = named(manifests, "Deployment", f"rel-baton-large-{role}")["spec"]["template"]["spec"]["containers"][0]
        canary = named(manifests, "Deployment", f"rel-baton-large-{role}-v2")["spec"]["template"]["spec"]["containers"][
            0
        ]
        assert (stable["image"].rpartition(":")[2], canary["image"].rpartition(":")[2]) == ("0.1.0", "0.2.0")
        assert (flags(stable)["revision"], flags(canary)["revision"]) == ("stable", "v2")
        assert "enable-prefix-caching" in flags(stable)
        assert "no-enable-prefix-caching" in flags(canary)
        assert flags(canary)["max-model-len"] == flags(stable)["max-model-len"]
    assert named(manifests, "Deployment", "rel-baton-large-prefill")["spec"]["replicas"] == 2
    assert named(manifests, "Deployment", "rel-baton-large-prefill-v2")["spec"]["replicas"] == 1
    volumes = named(manifests, "Deployment", "rel-baton-disk-decode-canary")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "model-disk", "persistentVolumeClaim": {"claimName": "other", "readOnly": True}} in volumes


def test_zero_and_false_override():
    values = {
        "worker": {"gpus": 1, "engine": {"deterministic": True}},
        "models": {"a": {"decode": {"gpus": 0, "replicas": 0, "engine": {"deterministic": False}}}},
    }
    decode = named(render(values), "Deployment", "rel-baton-a-decode")
    [container] = decode["spec"]["template"]["spec"]["containers"]
    assert decode["spec"]["replicas"] == 0
    assert "no-deterministic" in flags(container)
    assert flags(container)["device"] == "cpu"


def test_several_gpus_divide_a_model():
    worker = {"gpus": 4, "tensorParallel": 4}
    values = {"gpuPairs": {"enabled": True}, "models": {"a": {"worker": worker, "prefill": {}}}}
    for role in ("prefill", "decode"):
        [container] = named(render(values), "Deployment", f"rel-baton-a-{role}")["spec"]["template"]["spec"][
            "containers"
        ]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
        assert {"name": "BATON_TENSOR_PARALLEL", "value": "4"} in container["env"]
        assert {"name": "BATON_GPU_PAIR_MEMORY", "value": "0"} not in container["env"]
    assert "kv-transport" not in flags(container), "each rank sends its heads from GPU to GPU"
    worker["expertParallel"] = True
    deployment = named(render(values), "Deployment", "rel-baton-a-decode")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "BATON_EXPERT_PARALLEL", "value": "true"} in container["env"]
    with pytest.raises(Exception, match=r"models\.a\.prefill: expertParallel divides experts"):
        render({"models": {"a": {"prefill": {"expertParallel": True}}}})
    worker["gpus"] = 2
    with pytest.raises(Exception, match=r"models\.a\.prefill: tensorParallel is 4 and gpus is 2"):
        render(values)


def test_stages_multiply_the_gpus():
    worker = {"gpus": 4, "tensorParallel": 2, "pipelineParallel": 2}
    values = {"gpuPairs": {"enabled": True}, "models": {"a": {"worker": worker}}}
    [container] = named(render(values), "Deployment", "rel-baton-a-decode")["spec"]["template"]["spec"]["containers"]
    for name in ("TENSOR", "PIPELINE"):
        assert {"name": f"BATON_{name}_PARALLEL", "value": "2"} in container["env"]
    assert flags(container)["kv-transport"] == "tcp", "KV of stages goes through the host"
    worker["gpus"] = 2
    with pytest.raises(Exception, match="tensorParallel is 2, pipelineParallel is 2 and gpus is 2"):
        render(values)


def test_the_canary_config_map_says_where_canaries_stand():
    config = named(case("everything"), "ConfigMap", "rel-baton-canary-values")["data"]
    controller = yaml.safe_load(
        named(case("everything"), "ConfigMap", "rel-baton-controller")["data"]["controller.yaml"]
    )
    generation = controller["models"]["acme/Large"]["canary"]["generation"]
    assert json.loads(config["canary.json"]) == {
        "acme/Large": {"revision": "v2", "weight": 0, "shadow": True, "generation": generation},
        "disk": {"revision": "canary", "weight": 0, "shadow": False},
    }
    assert named(case("defaults"), "ConfigMap", "rel-baton-canary-values")["data"] == {"canary.json": "{}"}


def test_operators_alone_write_the_override():
    assert "data" not in named(case("everything"), "ConfigMap", "rel-baton-canary-override")


def test_the_controller_runs_only_where_it_has_something_to_do():
    name = "rel-baton-controller"
    assert name not in [workload["metadata"]["name"] for workload in workloads(case("defaults"))]
    disabled = {"canary": {"enabled": False, "analysis": {"enabled": True}}, "scaler": {"enabled": False}}
    assert name not in [workload["metadata"]["name"] for workload in workloads(render({"models": {"a": disabled}}))]
    config = yaml.safe_load(named(case("everything"), "ConfigMap", name)["data"]["controller.yaml"])
    generation = config["models"]["acme/Large"]["canary"].pop("generation")
    assert len(generation) == 12
    assert config == {
        "models": {
            "acme/Large": {
                "canary": {
                    "revision": "v2",
                    "stable": "stable",
                    "steps": [10, 100],
                    "intervalSeconds": 300,
                    "minRequests": 300,
                    "maxTtftP95Ratio": 1.2,
                    "maxTpotP95Ratio": 1.2,
                    "maxErrorRateIncrease": 0.01,
                }
            },
            "small": {
                "scaler": {
                    "dryRun": False,
                    "ttftSloSeconds": 1,
                    "tpotSloSeconds": 0.05,
                    "prefill": {"deployment": "rel-baton-small-prefill", "min": 1, "max": 4},
                    "decode": {"deployment": "rel-baton-small-decode", "min": 2, "max": 8},
                }
            },
        }
    }


def test_the_controller_can_read_its_file(tmp_path):
    path = tmp_path / "controller.yaml"
    path.write_text(named(case("everything"), "ConfigMap", "rel-baton-controller")["data"]["controller.yaml"])
    assert set(read_config(path).models) == {"acme/Large", "small"}


def test_replicas_are_left_to_whoever_scales():
    manifests = case("everything")
    without = {workload["metadata"]["name"] for workload in workloads(manifests) if "replicas" not in workload["spec"]}
    targets = {
        manifest["spec"]["scaleTargetRef"]["name"]
        for manifest in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject")
    }
    assert without == targets | {"rel-baton-small-prefill", "rel-baton-small-decode"}
    assert without == {
        *("rel-baton-gateway", "rel-baton-small-prefill", "rel-baton-small-decode"),
        *("rel-baton-large-decode", "rel-baton-large-decode-v2"),
        *("rel-baton-disk-decode", "rel-baton-disk-decode-canary"),
    }


def test_models_come_into_gateways_and_workers():
    manifests = case("everything")
    gateway = named(manifests, "Deployment", "rel-baton-gateway")["spec"]["template"]["spec"]
    inits = {container["name"]: container for container in gateway["initContainers"]}
    pull = ["model", "pull", f"acme/Large-1.0@{COMMIT}", "--cache=/models/large", "--volume-size=20Gi"]
    assert inits["model-large"]["args"] == [*pull, "--no-weights"]
    assert inits["model-large"]["image"] == gateway["containers"][0]["image"]
    assert "*.safetensors) ;;" in inits["model-small"]["command"][2]
    small = named(manifests, "Deployment", "rel-baton-small-decode")["spec"]["template"]["spec"]
    assert "safetensors" not in small["initContainers"][0]["command"][2]
    assert flags(small["containers"][0])["model"] == "/models/small"
    large = named(manifests, "Deployment", "rel-baton-large-decode")["spec"]["template"]["spec"]
    [init] = large["initContainers"]
    assert init["args"] == pull
    assert init["image"] == large["containers"][0]["image"]
    env = {variable["name"]: variable.get("value") for variable in init["env"]}
    proxy = "http://proxy.example:3128"
    assert env == {"HF_TOKEN": None, "HF_ENDPOINT": "https://hub.example:8443", "HTTPS_PROXY": proxy}
    assert init["env"][0]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    for spec in (gateway, small, large):
        [main] = spec["containers"]
        assert all(mount["readOnly"] for mount in main["volumeMounts"] if mount["mountPath"].startswith("/models"))
    folder = f"/models/large/models--acme--Large-1.0/snapshots/{COMMIT}"
    assert flags(large["containers"][0])["model"] == folder
    models = yaml.safe_load(named(manifests, "ConfigMap", "rel-baton-gateway")["data"]["models.yaml"])["models"]
    [listed] = [model for model in models if model["name"] == "acme/Large"]
    assert (listed["folder"], listed["chat_template"]) == (folder, f"{folder}/other.jinja")
    image = named(case("image volume"), "Deployment", "rel-baton-a-decode")["spec"]["template"]["spec"]
    assert flags(image["containers"][0])["model"] == "/models/a/model"


def test_a_shared_cache_of_models_is_written_by_init_containers_only():
    manifests = case("hub caches")
    volumes = {"a": {"persistentVolumeClaim": {"claimName": "models"}}}
    volumes["b"] = {"hostPath": {"path": "/data/hub", "type": "Directory"}}
    for component, keys in (("gateway", "ab"), ("a-prefill", "a"), ("a-decode", "a"), ("b-decode", "b")):
        spec = named(manifests, "Deployment", f"rel-baton-{component}")["spec"]["template"]["spec"]
        for key, init in zip(keys, spec["initContainers"], strict=True):
            assert {"name": f"model-{key}", **volumes[key]} in spec["volumes"]
            assert init["volumeMounts"] == [{"name": f"model-{key}", "mountPath": f"/models/{key}"}]
            [mount] = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == f"model-{key}"]
            assert mount["readOnly"] is True
            assert "--volume-size" not in str(init["args"])


def test_pods_reach_a_hub_where_a_model_comes_from_one():
    def ports(name: str) -> dict[str, list[int]]:
        """Return the ports to which pods may connect at any address."""
        open_rules = {
            policy["metadata"]["labels"].get("app.kubernetes.io/component"): [
                entry["port"]
                for rule in policy["spec"].get("egress", ())
                if "to" not in rule
                for entry in rule["ports"]
            ]
            for policy in of_kind(case(name), "NetworkPolicy")
        }
        return {component: open_rules[component] for component in ("gateway", "prefill", "decode")}

    api_server = [443, 6443]
    assert ports("defaults") == {"gateway": api_server, "prefill": [], "decode": []}
    assert ports("hub caches") == {"gateway": [*api_server, 443], "prefill": [443], "decode": [443]}
    assert ports("everything") == {
        "gateway": [*api_server, 8443, 3128],
        "prefill": [8443, 3128],
        "decode": [8443, 3128],
    }


def test_nginx_passes_streams_on_as_they_come():
    [ingress] = of_kind(case("everything"), "Ingress")
    annotations = {key.rpartition("/")[2]: value for key, value in ingress["metadata"]["annotations"].items()}
    assert annotations["proxy-buffering"] == "off"
    assert int(annotations["proxy-read-timeout"]) >= 3600
    assert annotations["proxy-body-size"] == "4m"
    assert annotations["backend-protocol"] == "HTTPS"
    assert annotations["x"] == "y"
    [route] = of_kind(case("everything"), "HTTPRoute")
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "0s"}


def test_the_admin_port_is_not_where_clients_come_in():
    for name in CASES:
        for service in of_kind(case(name), "Service"):
            ports = [port["name"] for port in service["spec"]["ports"]]
            if service["spec"].get("type"):
                assert ports == ["http"]


def test_certificates_of_pods_have_an_authority_of_the_release_s_own_or_the_one_that_is_said():
    manifests = case("everything")
    leaf, authority = (named(manifests, "Certificate", f"rel-baton-peer{end}")["spec"] for end in ("", "-ca"))
    issuers = {issuer["metadata"]["name"]: issuer["spec"] for issuer in of_kind(manifests, "Issuer")}
    assert issuers[leaf["issuerRef"]["name"]] == {"ca": {"secretName": authority["secretName"]}}
    assert issuers[authority["issuerRef"]["name"]] == {"selfSigned": {}}
    assert authority["isCA"] is True
    # An authority renewed with a new key would make pods that have read it and pods that have not refuse each other.
    assert authority["privateKey"]["rotationPolicy"] == "Never"
    assert not of_kind(case("bare"), "Issuer")
    [certificate] = of_kind(case("bare"), "Certificate")
    assert certificate["spec"]["issuerRef"] == {"name": "ca", "kind": "ClusterIssuer"}
    assert not of_kind(case("outside"), "Issuer", "Certificate")


def test_pod_labels_have_no_version():
    """A new version of the chart must not restart pods that have not changed."""
    for workload in workloads(case("everything")):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert not {"app.kubernetes.io/version", "helm.sh/chart"} & set(labels)


def test_a_restart_follows_from_what_is_read_at_start_only():
    def checksum(values: dict[str, object]) -> str:
        deployment = named(render(values), "Deployment", "rel-baton-gateway")
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["checksum/models"])

    one, two = {"models": {"a": {"name": "x"}}}, {"models": {"a": {"name": "y"}}}
    assert checksum(one) != checksum(two)
    assert checksum(one) == checksum({**one, "tenants": {"tenants": {"acme": {}}}})


def test_init_containers_of_models_are_the_only_ones():
    for name in CASES:
        for workload in workloads(case(name)):
            spec = workload["spec"]["template"]["spec"]
            assert len(containers(spec)) == 1 or spec["initContainers"][0]["name"].startswith("model-")
