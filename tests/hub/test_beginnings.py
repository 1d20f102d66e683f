"""The beginnings of files of weights, read on a hub."""

import pytest

from baton_hub.beginnings import Read, read_beginnings
from baton_hub.errors import HubError
from baton_hub.listing import RemoteFile
from baton_hub.model_id import HubModel

from .conftest import SHARDS
from .double import COMMIT, REPO, HubDouble

MODEL = HubModel(REPO, COMMIT)
INDEX = "model.safetensors.index.json"


def read_twice(file: RemoteFile, read: Read) -> bytes:
    return read(8) + read(300_000)


def test_no_more_than_the_beginnings_is_asked_for(hub: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    beginnings = hub.files[INDEX], [hub.files[name][:300_008] for name in SHARDS]
    assert read_beginnings(MODEL, read_twice) == beginnings
    for name in SHARDS:
        assert [request.range for request in hub.downloads(name)] == ["bytes=0-131071", "bytes=131072-300007"]
    assert read_beginnings(MODEL, lambda file, read: read(2 * file.size))[1] == [hub.files[name] for name in SHARDS]
    monkeypatch.setattr("baton_hub.client._wait_s", lambda error, failures: 0.01)
    hub.cuts, hub.failures = [1 << 16] * 3, 2
    assert read_beginnings(MODEL, read_twice) == beginnings
    hub.ranges = False
    assert read_beginnings(MODEL, read_twice) == beginnings


def test_what_is_no_index_is_refused(hub: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files[INDEX] = b""
    with pytest.raises(HubError, match="is not an index"):
        read_beginnings(MODEL, read_twice)
    for module in ("beginnings", "selection"):
        monkeypatch.setattr(f"baton_hub.{module}.LARGEST_INDEX", 200_000)
    hub.files[INDEX] = b" " * 1_000_000
    with pytest.raises(HubError, match="has more than 200000 bytes"):
        read_beginnings(MODEL, read_twice)
    assert hub.downloads(INDEX)[-1].range == "bytes=0-200000"
