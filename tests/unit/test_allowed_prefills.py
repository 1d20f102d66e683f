"""The addresses that a decode pod may link to."""

import asyncio
from typing import Any

import pytest

from baton_decode.allowed_prefills import AllowedPrefills, parse_entry


def allowed(*entries: str, own: str = "0.0.0.0:50051") -> AllowedPrefills:
    return AllowedPrefills(map(parse_entry, entries), own)


@pytest.mark.parametrize(
    ("entry", "address", "expected"),
    [
        ("10.0.0.0/8:50051", "10.1.2.3:50051", True),
        ("10.0.0.0/8:50051", "10.1.2.3:6379", False),
        ("10.0.0.0/8", "10.1.2.3:6379", True),
        ("10.0.0.0/8", "169.254.169.254:80", False),
        ("[fd00::/8]:50051", "[fd00::1]:50051", True),
        ("[fd00::/8]:50051", "[fe80::1]:50051", False),
        ("prefill:50051", "prefill:50051", True),
        ("prefill:50051", "PREFILL:50051", True),
        ("prefill:50051", "prefill.example.com:50051", False),
        ("127.0.0.0/8", "0.0.0.0:1", False),
        ("127.0.0.1", "127.0.0.2:1", False),
    ],
)
async def test_an_address_is_compared_with_every_entry(entry: str, address: str, expected: bool) -> None:
    assert allowed(entry).allow(address) is expected


async def test_a_pod_does_not_link_to_itself() -> None:
    assert not allowed("127.0.0.0/8", own="127.0.0.1:5").allow("127.0.0.1:5")


async def test_a_name_allows_the_addresses_that_it_stands_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = ["10.0.0.1"]

    async def look_up(_self: Any, name: str, *_: Any, **__: Any) -> list[Any]:
        assert name == "prefill"
        if not pods:
            raise OSError("no such name")
        return [(0, 0, 0, "", (pod, 0)) for pod in pods]

    monkeypatch.setattr("baton_decode.allowed_prefills._LEAST_INTERVAL_S", 0.01)
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    hosts = allowed("prefill:50051")
    following = asyncio.create_task(hosts.follow())

    async def until(address: str, expected: bool) -> None:
        async with asyncio.timeout(5):
            while hosts.allow(address) is not expected:
                hosts.allow("10.9.9.9:1")
                await asyncio.sleep(0.01)

    await until("10.0.0.1:50051", True)
    assert not hosts.allow("10.0.0.1:80")
    pods[:] = ["10.0.0.2"]
    await until("10.0.0.2:50051", True)
    assert not hosts.allow("10.0.0.1:50051")
    pods.clear()
    await until("10.0.0.2:50051", False)
    following.cancel()


@pytest.mark.parametrize("text", ["", "host:0", "host:99999", "10.0.0.0/99", "host:x", "fd00::1", "a/b"])
def test_an_entry_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="network"):
        parse_entry(text)
