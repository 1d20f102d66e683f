"""Several models behind one gateway, and pools of pods for some of their requests."""

import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from baton_gateway.models.models_file import ModelsFileError, read_models
from baton_gateway.settings import GatewaySettings
from tests.tenant_keys import write_tenants

from .fake_worker import FakePod
from .harness import Stack, pods, running
from .tiny_models import write_model


def gateway_of(
    folder: Path, every: list[FakePod], *models: dict[str, Any], **settings: Any
) -> AbstractAsyncContextManager[Stack]:
    path = folder / "models.yaml"
    path.write_text(json.dumps({"models": models}))
    return running(None, every, models_file=path, **settings)


async def served(stack: Stack, **request: Any) -> list[str]:
    listed = await stack.http.get("/v1/models", **request)
    return [card["id"] for card in listed.json()["data"]]


@pytest.mark.processes
async def test_the_name_decides(tmp_path, model_folder, tokenizer):
    write_model(tmp_path / "other", tokenizer)
    async with pods(2) as every:
        first, second = every
        models = (
            {"name": "small", "folder": str(model_folder), "pools": [{"decode": [first.address]}]},
            {"folder": "other", "pools": [{"decode": [second.address]}]},
        )
        async with gateway_of(tmp_path, every, *models) as stack:
            assert await served(stack) == ["small", "other"]
            for name, pod, rest in (("small", first, second), ("other", second, first)):
                for answer in (
                    await stack.complete(model=name),
                    await stack.chat(model=name),
                    await stack.respond(model=name),
                ):
                    assert answer.json()["model"] == name
                assert (len(pod.jobs), len(rest.jobs)) == (3, 0)
                pod.jobs.clear()
            assert (await stack.complete(model="tiny")).status_code == 404
            # One model being gone leaves the other as it is.
            await second.stop()
            fleets = [pool.fleet for _, pool in stack.gateway.catalog.pools]
            await stack.until(lambda: not fleets[1].ready)
            assert await served(stack) == ["small"]
            assert (await stack.http.get("/ready")).status_code == 200
            assert (await stack.complete(model="small")).status_code == 200
            assert (await stack.complete(model="other")).status_code == 503
            assert (await stack.http.get("/v1/models/other")).status_code == 503


@pytest.mark.processes
async def test_the_length_of_the_prompt_decides(tmp_path, model_folder):
    async with pods(2) as every:
        short, long = every
        pools = [
            {"name": "short", "decode": [short.address], "max_prompt_tokens": 10},
            {"name": "long", "decode": [long.address], "max_prompt_tokens": 100},
        ]
        model = {"name": "tiny", "folder": str(model_folder), "pools": pools}
        async with gateway_of(tmp_path, every, model) as stack:
            for prompt, fields, pod in (
                ([5] * 10, {}, short),
                ([5] * 11, {}, long),
                ([[5] * 3, [5] * 11], {}, long),  # the longest of them
                ([5] * 101, {}, long),  # longer than any is meant for
                ([5] * 50, {"truncate_prompt_tokens": 9}, short),
            ):
                assert (await stack.complete(prompt, **fields)).status_code == 200
                assert [bool(each.jobs) for each in every] == [pod is each for each in every]
                for each in every:
                    each.jobs.clear()
            too_long = await stack.complete([5] * 513)
            assert too_long.json()["error"]["code"] == "context_length_exceeded"
            # Short ones can go where the long ones do, when nobody else is there.
            await short.stop()
            fleets = [pool.fleet for _, pool in stack.gateway.catalog.pools]
            await stack.until(lambda: not fleets[0].ready)
            assert (await stack.complete([5] * 3)).status_code == 200
            assert len(long.jobs) == 1


@pytest.mark.processes
async def test_the_tenant_decides(tmp_path, model_folder):
    headers = write_tenants(file := tmp_path / "tenants.yaml", {"acme": {}, "zeta": {}})
    async with pods(2) as every:
        theirs, everybody = every
        only = {"name": "acme", "decode": [theirs.address], "tenants": ["acme"]}
        models = (
            {"name": "tiny", "folder": str(model_folder), "pools": [only, {"decode": [everybody.address]}]},
            {"name": "own", "folder": str(model_folder), "pools": [only]},
        )
        async with gateway_of(tmp_path, every, *models, tenants_file=file) as stack:

            async def ask(tenant: str, model: str) -> Any:
                body = {"model": model, "prompt": "hello"}
                return await stack.http.post("/v1/completions", json=body, headers=headers[tenant])

            assert (await ask("acme", "tiny")).status_code == 200
            assert [len(each.jobs) for each in every] == [1, 0]
            assert (await ask("zeta", "tiny")).status_code == 200
            assert [len(each.jobs) for each in every] == [1, 1]
            refused = await ask("zeta", "own")
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
            assert await served(stack, headers=headers["acme"]) == ["tiny", "own"]
            assert await served(stack, headers=headers["zeta"]) == ["tiny"]


def broken_files(folder: Path) -> Iterator[tuple[str, str]]:
    pool = {"decode": ["a:1"]}
    model = {"name": "m", "folder": str(folder), "pools": [pool]}
    yield "{", "models.yaml"
    for models, complaint in (
        ([], "length >= 1"),
        ([{**model, "pools": []}], "length >= 1"),
        ([{**model, "colour": "red"}], "colour"),
        ([model, model], "two models with the name 'm'"),
        ([{**model, "pools": [pool, pool]}], "model m: there are two pools with the name 'default'"),
        ([{**model, "folder": "nowhere"}], "nowhere is not a folder"),
        ([{**model, "pools": [{"decode": ["a"]}]}], "model m, pool default: 'a' is not host:port"),
        ([{**model, "pools": [{"prefill": ["a:1"]}]}], "decode"),
    ):
        yield json.dumps({"models": models}), complaint


def test_a_file_that_cannot_be_used(tmp_path):
    path = tmp_path / "models.yaml"
    with pytest.raises(ModelsFileError, match="cannot be read"):
        read_models(path)
    for content, complaint in broken_files(tmp_path):
        path.write_text(content)
        with pytest.raises(ModelsFileError, match=complaint):
            read_models(path)


def test_the_file_says_all(tmp_path):
    with pytest.raises(ValidationError, match="give no others"):
        GatewaySettings(model=tmp_path, decode_addresses="a:1", models_file=tmp_path / "models.yaml")
    with pytest.raises(ValidationError, match="a model is needed, or a models_file"):
        GatewaySettings(decode_addresses="a:1")
