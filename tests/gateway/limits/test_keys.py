"""Keys and tenants: what is stored, which requests are admitted, and how soon changes take effect."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis
from typer.testing import CliRunner

from baton_cli.errors import UserError
from baton_cli.main import app
from baton_gateway.tenancy.key_book import FileKeys, RedisKeys
from baton_gateway.tenancy.keys import make_key, utc_now
from baton_gateway.tenancy.limits.redis_store import connect
from baton_gateway.tenancy.tenants import Tenants, TenantsError, read_tenants

from ..loop_watch import not_held
from .conftest import RedisServer

TENANTS = """
tenants:
  acme: {requests_per_minute: 60, models: [tiny, other]}
  small: {tokens_per_minute: 100}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    return path


@pytest.fixture
def keys_in_redis(redis_server: RedisServer) -> Iterator["Redis"]:
    redis = Redis.from_url(redis_server.url)
    redis.delete("baton:keys", "baton:keys:version")
    yield redis
    redis.delete("baton:keys", "baton:keys:version")


async def within_a_second(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 1
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def baton(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["keys", *arguments])
    return result.exit_code, result.stdout.strip() or str(result.exception)


def test_a_key_is_found_by_its_text_and_not_kept(file: Path) -> None:
    text, key = make_key("acme")
    FileKeys(file).put(key)
    assert text not in file.read_text()
    assert len(text.split("-", 2)[2]) * 6 >= 128
    identity = Tenants(file).identify(text)
    assert identity is not None
    assert (identity.name, identity.tenant.requests_per_minute, identity.key) == ("acme", 60, key.id)
    assert identity.may_use("tiny")
    assert not identity.may_use("third")
    for wrong in (text[:-1], text + "x", f"bt-{key.id}-", "bt-", "", "sk-something", text.upper(), "\ud800"):
        assert Tenants(file).identify(wrong) is None


def test_models_of_a_key_are_among_those_of_its_tenant(file: Path) -> None:
    one, other, neither = (make_key("acme", models=[model]) for model in ("tiny", "third", "fourth"))
    for _, key in (one, other, neither):
        FileKeys(file).put(key)
    tenants = Tenants(file)
    identity = tenants.identify(one[0])
    assert identity is not None
    assert identity.models == ("tiny",)
    assert tenants.identify(other[0]) is None


def test_an_expired_key_is_nobodys(file: Path) -> None:
    now = utc_now()
    for when, valid in ((now - timedelta(seconds=1), False), (now + timedelta(hours=1), True)):
        text, key = make_key("small", when)
        FileKeys(file).put(key)
        assert (Tenants(file).identify(text) is not None) == valid


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("tenants: {a: {requests_per_minute: -1}}", "$.tenants[...].requests_per_minute"),
        ("tenants: {a: {tokens_per_minute: 100000001}}", "100000000"),
        ("tenants: {a: {requests: 1}}", "requests"),
        ("tenants: [", "tenants.yaml"),
        ("keys: [{id: a, hash: b, tenant: nobody}]", "nobody"),
        ("tenants: {a: {}}\nkeys: [{id: k, hash: b, tenant: a, expires: '2030-01-01T00:00:00'}]", "time zone"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_place(tmp_path: Path, content: str, what: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(content)
    with pytest.raises(TenantsError, match=r".*") as caught:
        read_tenants(path)
    assert what in str(caught.value)


async def test_changes_of_the_file_are_seen_and_broken_ones_ignored(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, key = make_key("small")
    FileKeys(file).put(key)
    tenants = Tenants(file)
    tenants.start()
    assert tenants.identify(text) is not None
    FileKeys(file).remove(key.id)
    await within_a_second(lambda: tenants.identify(text) is None)
    new_text, new_key = make_key("small")
    FileKeys(file).put(new_key)
    await within_a_second(lambda: tenants.identify(new_text) is not None)
    await asyncio.to_thread(file.write_text, "tenants: {a: {requests_per_minute: many}}")
    await within_a_second(lambda: "stay as they were" in caplog.text)
    assert tenants.identify(new_text) is not None
    await tenants.stop()


async def test_thousands_of_keys_are_read_while_the_loop_goes_on(file: Path) -> None:
    tenants = Tenants(file)
    tenants.start()
    text, key = make_key("small")
    others = [make_key("small")[1] for _ in range(8000)]

    async def change() -> None:
        content = {"tenants": {"small": {"weight": 1 + time.time()}}, "keys": [*others, key]}
        await asyncio.to_thread(lambda: file.write_bytes(msgspec.json.encode(content)))
        known = tenants.known
        while tenants.known is known or tenants.identify(text) is None:
            await asyncio.sleep(0.01)

    await not_held(change)
    await tenants.stop()


def test_json_is_yaml_and_times_are_strings_there(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    expiry = (utc_now() + timedelta(days=1)).isoformat()
    text, key = make_key("small")
    key_fields = {"id": key.id, "hash": key.hash, "tenant": "small", "expires": expiry}
    path.write_text(json.dumps({"tenants": {"small": {"weight": 2}}, "keys": [key_fields]}))
    identity = Tenants(path).identify(text)
    assert identity is not None
    assert identity.tenant.weight == 2


@pytest.fixture
def secrets(tmp_path: Path) -> list[str]:
    """Return the keys of two versions of a Secret, the first of which is mounted at tmp_path."""
    texts = []
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        text, key = make_key("small")
        (tmp_path / version / "tenants.yaml").write_text(TENANTS)
        FileKeys(tmp_path / version / "tenants.yaml").put(key)
        texts.append(text)
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "tenants.yaml").symlink_to("data/tenants.yaml")
    return texts


async def test_a_mounted_secret_is_replaced_by_its_link(tmp_path: Path, secrets: list[str]) -> None:
    """Kubernetes swaps the folder that the file's link leads through."""
    tenants = Tenants(tmp_path / "tenants.yaml")
    tenants.start()
    assert tenants.identify(secrets[0]) is not None
    os.symlink("two", tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "data")
    await within_a_second(lambda: tenants.identify(secrets[1]) is not None)
    assert tenants.identify(secrets[0]) is None
    await tenants.stop()


async def test_keys_in_redis_are_seen_and_revoked(file: Path, redis_server: RedisServer) -> None:
    book = RedisKeys(Redis.from_url(redis_server.url), file)
    tenants = [Tenants(file, redis=connect(redis_server.url)) for _ in range(2)]
    for each in tenants:
        each.start()
    text, key = make_key("acme")
    await asyncio.to_thread(book.put, key)
    await within_a_second(lambda: all(each.identify(text) for each in tenants))
    await asyncio.to_thread(book.remove, key.id)
    await within_a_second(lambda: not any(each.identify(text) for each in tenants))
    for each in tenants:
        await each.stop()


@pytest.mark.parametrize("where", ["file", "redis"])
def test_the_command_makes_lists_rotates_and_revokes(file: Path, redis_server: RedisServer, where: str) -> None:
    place = ["--file", str(file)] if where == "file" else ["--redis-url", redis_server.url, "--file", str(file)]

    def identify(text: str) -> Any:
        if where == "file":
            return Tenants(file).identify(text)
        tenants = Tenants(file, redis=connect(redis_server.url))
        asyncio.run(tenants._redis_keys.follow())  # type: ignore[union-attr]
        return tenants.identify(text)

    code, text = baton("create", "acme", "--days", "30", "--model", "tiny", *place)
    assert code == 0
    assert identify(text).models == ("tiny",)
    id = text.split("-")[1]
    code, listed = baton("list", *place)
    assert code == 0
    assert f"{id}  acme  valid" in listed
    assert text not in listed
    code, second = baton("rotate", id, *place)
    assert code == 0
    assert identify(text).name == identify(second).name == "acme"
    assert identify(second).models == ("tiny",)
    code, third = baton("rotate", second.split("-")[1], "--overlap-hours", "0", *place)
    assert identify(second) is None
    assert baton("revoke", third.split("-")[1], *place)[0] == 0
    assert identify(third) is None
    code, message = baton("revoke", "nothing", *place)
    assert code == 1
    assert "nothing" in message


def test_the_command_says_what_is_wrong(file: Path, redis_server: RedisServer, keys_in_redis: "Redis") -> None:
    for arguments, what in (
        (["create", "nobody", "--file", str(file)], "nobody"),
        (["create", "acme"], "--redis-url"),
        (["create", "acme", "--redis-url", redis_server.url], "--file"),
        (["create", "nobody", "--redis-url", redis_server.url, "--file", str(file)], "nobody"),
    ):
        code, message = baton(*arguments)
        assert code == 1
        assert what in message
    assert keys_in_redis.hlen("baton:keys") == 0


async def test_a_key_whose_tenant_is_gone_is_refused(
    file: Path, redis_server: RedisServer, keys_in_redis: "Redis"
) -> None:
    text, key = make_key("small")
    RedisKeys(keys_in_redis, file).put(key)
    static = "sk-static"
    tenants = Tenants(file, [static], connect(redis_server.url))
    tenants.start()
    await within_a_second(lambda: tenants.identify(text))
    await asyncio.to_thread(file.write_text, "tenants: {acme: {}}")
    await within_a_second(lambda: tenants.identify(text) is None)
    # Static keys are of a tenant that needs no entry.
    assert (tenants.identify(static) or tenants).name == "default"  # type: ignore[union-attr]
    await tenants.stop()


async def test_without_a_file_redis_has_keys_of_the_default_tenant_alone(
    redis_server: RedisServer, keys_in_redis: "Redis"
) -> None:
    (text, key), (foreign_text, foreign) = make_key("default"), make_key("acme")
    RedisKeys(keys_in_redis).put(key)
    with pytest.raises(TenantsError, match="--file"):
        RedisKeys(keys_in_redis).put(foreign)
    keys_in_redis.hset("baton:keys", foreign.id, msgspec.json.encode(foreign))
    tenants = Tenants(None, redis=connect(redis_server.url))
    tenants.start()
    await within_a_second(lambda: tenants.identify(text))
    assert tenants.identify(foreign_text) is None
    await tenants.stop()


async def test_a_bad_entry_in_redis_harms_only_itself(
    file: Path, redis_server: RedisServer, keys_in_redis: "Redis", caplog: pytest.LogCaptureFixture
) -> None:
    (text, key), (odd_text, odd), (late_text, late) = (make_key("small") for _ in range(3))
    book = RedisKeys(keys_in_redis, file)
    good = {"id": key.id, "hash": key.hash, "tenant": "small"}
    bad: dict[str | bytes, Any] = {
        "notjson": "{SECRET",
        b"\xff": b"\xff\xfe",
        "unknown": json.dumps({**good, "id": "unknown", "colour": "red"}),
        "naive": json.dumps({**good, "id": "naive", "expires": "2030-01-01T00:00:00"}),
        "wrong": json.dumps({**good, "id": "wrong", "models": 5}),
        "huge": json.dumps({**good, "id": "huge", "models": ["x" * 100_000]}),
        "deep": '{"id":' + "[" * 8000,
        "half": '{"id": "half", "hash": "\\ud800", "tenant": "small"}',
        # Of another one's id: it must not take the place of that key.
        "zzz": json.dumps({**good, "hash": "0" * 64}),
    }
    for id, value in bad.items():
        keys_in_redis.hset("baton:keys", id, value)
    # A hash that can be read, but is none.
    keys_in_redis.hset("baton:keys", odd.id, json.dumps({**good, "id": odd.id, "hash": "\u00e9"}))
    book.put(key)
    tenants = Tenants(file, redis=connect(redis_server.url))
    tenants.start()
    await within_a_second(lambda: tenants.identify(text))
    assert tenants.identify(odd_text) is None
    assert tenants.unusable_keys == len(bad)
    assert {each.id for each in book.all()} == {key.id, odd.id}
    await asyncio.to_thread(book.put, late)
    await within_a_second(lambda: tenants.identify(late_text))
    await asyncio.to_thread(book.remove, key.id)
    await within_a_second(lambda: tenants.identify(text) is None)
    assert "SECRET" not in caplog.text
    await tenants.stop()


@pytest.mark.parametrize("where", ["file", "redis"])
def test_a_rotated_key_has_a_life_of_its_own(
    file: Path, redis_server: RedisServer, keys_in_redis: "Redis", where: str
) -> None:
    place = ["--file", str(file), *(["--redis-url", redis_server.url] if where == "redis" else [])]
    book = RedisKeys(keys_in_redis, file) if where == "redis" else FileKeys(file)

    def days_left(text: str) -> float | None:
        found = RedisKeys(keys_in_redis, file) if where == "redis" else FileKeys(file)
        [key] = [key for key in found.all() if key.id == text.split("-")[1]]
        return None if key.expires is None else round((key.expires - utc_now()) / timedelta(days=1), 2)

    def rotate(text: str, *arguments: str) -> str:
        result = CliRunner().invoke(app, ["keys", "rotate", text.split("-")[1], *arguments, *place])
        assert result.exit_code == 0, result.exception
        new = result.stdout.strip()
        end = "never expires" if days_left(new) is None else "valid until"
        assert f"new key {new.split('-')[1]}: {end}" in result.stderr
        return new

    _, first = baton("create", "acme", "--days", "30", *place)
    [old] = (book if where == "redis" else FileKeys(file)).all()
    # Nearly over, as most are that get rotated.
    old.expires = utc_now().replace(microsecond=0) + timedelta(days=2)
    (book if where == "redis" else FileKeys(file)).put(old)
    second = rotate(first)
    assert (days_left(first), days_left(second)) == (1, 30)
    assert days_left(rotate(first)) == 30
    assert days_left(rotate(second, "--days", "7")) == 7
    _, endless = baton("create", "acme", *place)
    assert days_left(rotate(endless)) is None
    # That one ends with the overlap now, which was not its life.
    code, message = baton("rotate", endless.split("-")[1], *place)
    assert (code, "--days" in message) == (1, True)
    for days in ("inf", "nan", "1e9", "-1"):
        result = CliRunner().invoke(app, ["keys", "rotate", first.split("-")[1], "--days", days, *place])
        assert result.exit_code == 2 or isinstance(result.exception, UserError)
