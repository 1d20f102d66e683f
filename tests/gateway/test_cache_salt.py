"""The cache scope of a request, as gateways send it to pods and as they use it in their own prefix index."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_common.block_hash import block_keys
from baton_common.cache_scope import MAX_SALT_BYTES, CacheScope
from baton_gateway.models.conversation import Conversation
from baton_gateway.models.model import ModelError, load_model
from baton_gateway.models.models_file import (
    ModelsFileError,
    ModelSpec,
    PoolSpec,
    PublishedMessage,
    PublishedPrefix,
    read_models,
)
from baton_gateway.models.published import PublishedPrefixes
from baton_gateway.routing.canary import CanaryShare
from baton_gateway.tenancy.cache_salt import cache_salt
from baton_gateway.tenancy.tenants import Identity, Tenant
from baton_proto import serving_pb2 as pb
from tests.tenant_keys import write_tenants

from .harness import Stack, pods, running
from .test_resume import breaking
from .tiny_models import write_model

TENANTS: dict[str, dict[str, str]] = {
    "acme": {},
    "road": {},
    "north": {"cache_group": "eu"},
    "south": {"cache_group": "eu"},
    "eu": {},
}
PROMPT = list(range(1, 41))
SECRET, PUBLIC = "The merger is on Friday.", "You are a helpful assistant who answers in French."
# Writes the system message at the beginning of the user's, as Mistral's do, and refuses a conversation without one.
MOVED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if messages[-1].role != 'user' %}{{ raise_exception('the last message must be the user\\'s') }}{% endif %}"
)
TWO_MESSAGES = "{% if messages|length > 2 %}{{ raise_exception('too many messages') }}{% endif %}"


def salt_of(tenant: str, group: str = "") -> bytes:
    return cache_salt(Identity(tenant, Tenant(cache_group=group)))


async def scope_of(stack: Stack, prompt: Any, **request: Any) -> pb.CacheScope:
    """Send a completion and return the scope that the pod was told of."""
    answer = await stack.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt}, **request)
    assert answer.status_code == 200, answer.text
    return stack.pod.jobs[-1].submit.cache_scope


async def chat_scope(stack: Stack, system: str, user: str, headers: dict[str, str]) -> tuple[int, list[int]]:
    """Send a chat and return how many tokens are shared, and the prompt."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    answer = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return stack.pod.jobs[-1].submit.cache_scope.shared_tokens, stack.pod.jobs[-1].prompt


@pytest.mark.processes
async def test_each_tenant_has_a_salt_of_its_own_and_a_group_has_one_together(tmp_path, model_folder):
    headers = write_tenants(tmp_path / "tenants.json", TENANTS)
    async with pods() as decodes, running(model_folder, decodes, tenants_file=tmp_path / "tenants.json") as stack:
        scopes = {name: await scope_of(stack, PROMPT, headers=headers[name]) for name in TENANTS}
        again = await scope_of(stack, "other", headers=headers["acme"])
    salts = {name: scope.salt for name, scope in scopes.items()}
    assert salts["north"] == salts["south"]
    assert len(set(salts.values())) == len(TENANTS) - 1
    assert all(0 < len(salt) <= MAX_SALT_BYTES for salt in salts.values())
    assert not any(name.encode() in salt for name, salt in salts.items())
    assert again.salt == salts["acme"]
    assert {scope.shared_tokens for scope in scopes.values()} == {0}


@pytest.mark.processes
@pytest.mark.parametrize("key", [None, "static"])
async def test_all_are_one_tenant_where_keys_tell_nobody_apart(model_folder, key):
    settings = {"api_keys": [key, "another"]} if key else {}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with pods() as decodes, running(model_folder, decodes, **settings) as stack:
        await scope_of(stack, PROMPT, headers=headers)
        assert not stack.pod.jobs[0].submit.HasField("cache_scope")


@pytest.mark.processes
async def test_a_prompt_goes_where_its_blocks_are_under_its_own_salt(tmp_path, model_folder):
    headers = write_tenants(tmp_path / "tenants.json", TENANTS)
    options = {"block_size": 4, "num_blocks": 1000}
    async with pods(**options) as decodes, pods(3, pb.ROLE_PREFILL, **options) as prefills:
        prefills[2].cached = list(block_keys(PROMPT, 4, CacheScope(salt_of("acme"))))
        async with running(model_folder, decodes, prefills, tenants_file=tmp_path / "tenants.json") as stack:

            async def asked(tenant: str) -> str:
                await scope_of(stack, PROMPT, headers=headers[tenant])
                return str(stack.pod.jobs[-1].submit.prefill_addresses[0])

            assert [await asked("acme") for _ in range(3)] == [prefills[2].address] * 3
            # Of the others no pod has anything, so they take the pods in turn.
            assert {await asked("road") for _ in range(2)} == {prefills[0].address, prefills[1].address}


@pytest.mark.processes
@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_keeps_its_scope_when_it_goes_on_on_another_pod(tmp_path, model_folder, n):
    headers = write_tenants(tmp_path / "tenants.json", TENANTS)
    async with pods(2) as decodes, running(model_folder, decodes, tenants_file=tmp_path / "tenants.json") as stack:
        decodes[0].script = breaking(3)
        body = {"model": "tiny", "prompt": PROMPT, "n": n, "max_tokens": 10}
        assert (await stack.http.post("/v1/completions", json=body, headers=headers["acme"])).status_code == 200
        jobs = [job for pod in decodes for job in pod.jobs]
        assert [len(pod.jobs) for pod in decodes] == [1, n]
        assert {job.submit.cache_scope.salt for job in jobs} == {salt_of("acme")}


@pytest.mark.processes
async def test_copies_for_a_canary_have_the_scope_of_the_request(tmp_path, model_folder):
    headers = write_tenants(tmp_path / "tenants.json", TENANTS)
    async with (
        pods() as stable,
        pods(revision="r2") as trial,
        running(model_folder, [*stable, *trial], tenants_file=tmp_path / "tenants.json") as stack,
    ):
        stack.fleet.router.canary = CanaryShare("r2", 100, shadow=True)
        assert (await scope_of(stack, PROMPT, headers=headers["acme"])).salt == salt_of("acme")
        assert (await trial[0].job()).submit.cache_scope.salt == salt_of("acme")
        await stack.until(lambda: not stack.fleet._shadows)


@pytest.mark.processes
async def test_pods_that_know_no_scopes_serve_unless_that_is_forbidden(tmp_path, model_folder, caplog):
    """While an upgrade is under way there may be no others."""
    headers = write_tenants(tmp_path / "tenants.json", TENANTS)
    settings = {"tenants_file": tmp_path / "tenants.json"}
    async with pods(cache_scopes=False) as old, pods() as new:
        async with running(model_folder, old, **settings) as stack:
            await scope_of(stack, PROMPT, headers=headers["acme"])
            [known] = (await stack.admin("/pods")).json()["pods"]
            assert known["cache_scopes"] is False
            assert "shared_prefix_cache" in {getattr(record, "event", "") for record in caplog.records}
        async with running(model_folder, [*old, *new], wait=False, require_cache_scopes=True, **settings) as stack:
            await stack.until(lambda: stack.fleet.ready)
            for _ in range(3):
                await scope_of(stack, PROMPT, headers=headers["acme"])
            assert (len(old[0].jobs), len(new[0].jobs)) == (1, 3)
            assert [pod["live"] for pod in (await stack.admin("/pods")).json()["pods"]] == [False, True]


@pytest.mark.processes
async def test_only_what_is_published_is_shared(tmp_path, model_folder):
    headers = write_tenants(tmp_path / "tenants.json", TENANTS)
    async with pods() as decodes:
        published = [{"messages": [{"role": "system", "content": PUBLIC}]}, {"text": "Translate this:"}]
        model = {"folder": str(model_folder), "name": "tiny", "pools": [{"decode": [decodes[0].address]}]}
        (tmp_path / "models.json").write_text(json.dumps({"models": [{**model, "published_prefixes": published}]}))
        files = {"models_file": tmp_path / "models.json", "tenants_file": tmp_path / "tenants.json"}
        async with running(None, decodes, **files) as stack:
            found = [await chat_scope(stack, PUBLIC, user, headers["acme"]) for user in ("hello", "how are you?")]
            own = stack.ids(f"<|begin|><|system|>{PUBLIC}<|end|>\n<|user|>")
            for shared, prompt in found:
                assert prompt[:shared] == own
            # Of another text nothing is shared but what all begin with.
            shared, prompt = await chat_scope(stack, SECRET, "hello", headers["acme"])
            assert prompt[:shared] == stack.ids("<|begin|><|system|>")
            # The words alone do not matter, but the tokens, whatever the request that has them.
            assert (await scope_of(stack, [*own, 9], headers=headers["road"])).shared_tokens == len(own)
            assert (await scope_of(stack, own[1:], headers=headers["road"])).shared_tokens == 0
            text = stack.model.tokenizer.encode_now("Translate this:", add_special_tokens=True)
            assert (await scope_of(stack, "Translate this: hello", headers=headers["road"])).shared_tokens == len(text)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (None, [("system", PUBLIC)]),
        (MOVED, [("system", PUBLIC)]),
        (MOVED, [("system", PUBLIC), ("user", "hi"), ("assistant", "hello")]),
        # No turn of the user's may follow these, so they are tokenized without one.
        (TWO_MESSAGES + MOVED, [("system", PUBLIC), ("user", "hi")]),
    ],
)
def test_published_messages_are_found_wherever_the_template_puts_them(tmp_path, tokenizer, template, messages):
    folder = write_model(tmp_path / "model", tokenizer, **({"template": template} if template else {}))
    turns = tuple(PublishedMessage(role=role, content=content) for role, content in messages)
    spec = ModelSpec(folder=folder, pools=(PoolSpec(),), published_prefixes=(PublishedPrefix(messages=turns),))
    model = load_model(spec)
    dicts = [{"role": turn.role, "content": turn.content} for turn in turns]
    if dicts[-1]["role"] != "user":
        dicts.append({"role": "user", "content": "What is it?"})
    ids = model.chat_tokens(Conversation(dicts, True, False, {}, None, False, "messages"))
    shared = model.tokenizer.decode(ids[: model.published.shared_tokens(ids)], skip_special_tokens=False)
    assert PUBLIC in shared
    assert "What" not in shared


def test_what_cannot_be_published_is_an_error_at_the_start(tmp_path, tokenizer):
    messages = (PublishedMessage(role="system", content=PUBLIC),)
    for template, what in ((None, "no chat template"), ("{{ raise_exception('never') }}", "never")):
        folder = write_model(tmp_path / what, tokenizer, template=template)
        spec = ModelSpec(folder=folder, pools=(PoolSpec(),), published_prefixes=(PublishedPrefix(messages=messages),))
        with pytest.raises(ModelError, match=f"published_prefixes: .*{what}"):
            load_model(spec)
    for wrong in ({}, {"text": "a", "messages": [{"role": "system", "content": "b"}]}, {"text": "a" * 65_537}):
        pools = [{"decode": ["a:1"]}]
        models = [{"folder": str(tmp_path), "pools": pools, "published_prefixes": [wrong]}]
        (tmp_path / "models.json").write_text(json.dumps({"models": models}))
        with pytest.raises(ModelsFileError, match=r"published_prefixes"):
            read_models(tmp_path / "models.json")


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=4), st.lists(st.integers(0, 2), max_size=10))
def test_shared_tokens_are_the_longest_common_beginning(prefixes, prompt):
    def common(prefix: list[int]) -> int:
        pairs = zip(prefix, prompt, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prefix), len(prompt)))

    assert PublishedPrefixes(prefixes).shared_tokens(prompt) == max(map(common, prefixes), default=0)
