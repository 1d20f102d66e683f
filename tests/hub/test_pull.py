"""Downloads from a hub into the cache."""

import json
import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download, scan_cache_dir, snapshot_download

from baton_hub import cache as cache_module
from baton_hub.cache import Cache
from baton_hub.errors import HubError
from baton_hub.listing import RemoteFile
from baton_hub.model_id import HubModel
from baton_hub.pull import Pulled, pull

from .conftest import SHARDS, WANTED, use
from .double import COMMIT, REPO, HubDouble, git_oid, sha256

MODEL = HubModel(REPO)
PINNED = HubModel(REPO, COMMIT)
INDEX = "model.safetensors.index.json"


@dataclass
class Recorded:
    """A Progress that records its calls."""

    total: int = 0
    done: int = 0
    said: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, count: int) -> None:
        with self.lock:
            self.total += count

    def advance(self, count: int) -> None:
        with self.lock:
            self.done += count

    def say(self, text: str) -> None:
        self.said.append(text)


def pulled(cache: Path, model: HubModel = MODEL, **options) -> tuple[Pulled, Recorded]:
    progress = Recorded()
    return pull(model, progress, root=cache, **options), progress


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(cache: Path, model: HubModel = MODEL, **options) -> str:
    with pytest.raises(HubError) as raised:
        pulled(cache, model, **options)
    return str(raised.value)


def blob(cache: Path, content: bytes) -> Path:
    return cache / "models--acme--tiny" / "blobs" / sha256(content)


def test_the_files_that_are_needed_as_huggingface_hub_itself_stores_them(hub: HubDouble, cache: Path, tmp_path: Path):
    found, progress = pulled(cache)
    wanted = {name: hub.files[name] for name in (*WANTED, INDEX, *SHARDS)}
    assert contents(found.folder) == wanted
    assert found == Pulled(cache / "models--acme--tiny" / "snapshots" / COMMIT, COMMIT)
    assert progress.done == progress.total == sum(map(len, wanted.values()))
    theirs = Path(snapshot_download(REPO, cache_dir=tmp_path / "theirs", allow_patterns=list(wanted)))
    assert {path.name: path.readlink() for path in found.folder.iterdir()} == {
        path.name: path.readlink() for path in theirs.iterdir()
    }
    assert hf_hub_download(REPO, SHARDS[0], cache_dir=cache, local_files_only=True) == str(found.folder / SHARDS[0])
    [scanned] = scan_cache_dir(cache).repos
    assert [revision.refs for revision in scanned.revisions] == [{"main"}]
    assert not scan_cache_dir(cache).warnings


def test_files_that_other_tools_have_downloaded_are_used(hub: HubDouble, cache: Path) -> None:
    snapshot_download(REPO, cache_dir=cache, allow_patterns=[*WANTED, INDEX, SHARDS[0]])
    hub.requests.clear()
    found, _ = pulled(cache)
    assert contents(found.folder).keys() == {*WANTED, INDEX, *SHARDS}
    assert [len(hub.downloads(name)) for name in (*WANTED, *SHARDS)] == [0, 0, 0, 0, 0, 1]


def test_gateways_get_no_weights(hub: HubDouble, cache: Path) -> None:
    found, _ = pulled(cache, weights=False)
    assert contents(found.folder).keys() == WANTED


def test_templates_with_a_name_are_in_a_folder_of_their_own(hub: HubDouble, cache: Path, tmp_path: Path) -> None:
    name = "additional_chat_templates/tool_use.jinja"
    hub.files |= {name: b"{{ messages }}", "additional_chat_templates/run.py": b"exit()", "onnx/config.json": b"{}"}
    found, _ = pulled(cache, weights=False)
    assert (found.folder / name).read_bytes() == hub.files[name]
    assert {path.name for path in found.folder.iterdir()} == {*WANTED, "additional_chat_templates"}
    assert [path.name for path in (found.folder / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]
    theirs = Path(snapshot_download(REPO, cache_dir=tmp_path / "theirs", allow_patterns=[name]))
    assert (found.folder / name).readlink() == (theirs / name).readlink()


def test_a_pinned_model_needs_the_hub_only_once(hub: HubDouble, cache: Path) -> None:
    pulled(cache, PINNED)
    hub.requests.clear()
    found, progress = pulled(cache, PINNED)
    assert (hub.requests, found.commit) == ([], COMMIT)
    assert progress.done == progress.total > 0


def test_a_branch_is_asked_for_again_and_tags_lead_to_their_commits(hub: HubDouble, cache: Path) -> None:
    assert pulled(cache, HubModel(REPO, "v1.0"))[0].commit == COMMIT
    hub.revisions["main"] = "2" * 40
    assert pulled(cache)[0].folder.name == "2" * 40
    # The blobs are shared by the commits.
    assert len(hub.downloads(SHARDS[0])) == 1


def test_nothing_is_asked_for_offline(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and the cache does not hold" in refusal(cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    pulled(cache, weights=False)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found, progress = pulled(cache, weights=False)
    assert (found.commit, hub.requests) == (COMMIT, [])
    assert COMMIT in progress.said[0]
    assert "HF_HUB_OFFLINE" in refusal(cache)


def test_offline_a_model_of_another_tool_is_used_if_it_is_whole(
    hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(snapshot_download(REPO, cache_dir=cache, allow_patterns=[*WANTED, INDEX, SHARDS[0]]))
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE" in refusal(cache)
        assert pulled(cache, weights=False)[0].folder == folder
    snapshot_download(REPO, cache_dir=cache, allow_patterns=SHARDS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pulled(cache)[0].folder == folder


def test_only_the_missing_bytes_are_asked_for(hub: HubDouble, cache: Path) -> None:
    content = hub.files[SHARDS[0]]
    blob(cache, content).parent.mkdir(parents=True)
    blob(cache, content).with_suffix(".incomplete").write_bytes(content[:700_000])
    found, _ = pulled(cache)
    assert [request.range for request in hub.downloads(SHARDS[0])] == [f"bytes=700000-{len(content) - 1}"]
    assert (found.folder / SHARDS[0]).read_bytes() == content


def test_broken_answers_go_on_where_they_ended(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_hub.client._wait_s", lambda error, failures: 0.01)
    hub.cuts, hub.failures = [1 << 18] * 6, 2
    found, progress = pulled(cache)
    assert (found.folder / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]
    assert progress.done == progress.total
    ranges = [request.range for request in hub.downloads(SHARDS[0])]
    assert len(ranges) > 1
    assert None not in ranges[1:]


def test_a_server_that_knows_no_ranges_sends_all_again(hub: HubDouble, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr("baton_hub.client._wait_s", lambda error, failures: 0.01)
    hub.ranges, hub.cuts = False, [1 << 20]
    found, progress = pulled(cache)
    assert (found.folder / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]
    assert progress.done == progress.total


def test_files_are_asked_for_in_parts_that_every_server_sends(hub: HubDouble, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr("baton_hub.client._LARGEST_REQUEST", 1 << 20)
    found, _ = pulled(cache)
    assert (found.folder / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]
    assert [request.range for request in hub.downloads(SHARDS[0])] == ["bytes=0-1048575", "bytes=1048576-2097151"]
    hub.ranges = False
    assert contents(pulled(cache.with_name("other"))[0].folder) == contents(found.folder)


def test_a_hub_that_stays_broken_is_given_up(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_hub.client._wait_s", lambda error, failures: 0.01)
    hub.failures = 1000
    assert refusal(cache).startswith("127.0.0.1 answers 503 (Service Unavailable)")


@pytest.mark.parametrize("name", [SHARDS[1], "tokenizer.json"])
def test_a_wrong_content_is_refused(hub: HubDouble, cache: Path, name: str) -> None:
    right = hub.files[name]
    hub.served[name] = b"x" * len(right)
    kind = f"SHA-256 is {sha256(hub.served[name])}" if name == SHARDS[1] else f"id is {git_oid(hub.served[name])}"
    message = refusal(cache)
    assert f"{name} of {REPO} was refused" in message
    assert kind in message
    assert not [path for path in cache.rglob("*") if path.is_file() and path.read_bytes() == hub.served[name]]
    del hub.served[name]
    assert (pulled(cache)[0].folder / name).read_bytes() == right


def test_a_content_that_is_longer_than_listed_is_refused(hub: HubDouble, cache: Path) -> None:
    hub.served[SHARDS[1]] = hub.files[SHARDS[1]] + b"more" * (1 << 20)
    assert "more than the 1048576 bytes" in refusal(cache)
    assert sum(path.lstat().st_size for path in cache.rglob("*") if path.is_file()) < 4 << 20


def test_a_damaged_part_of_an_earlier_download_is_replaced(hub: HubDouble, cache: Path) -> None:
    content = hub.files[SHARDS[0]]
    blob(cache, content).parent.mkdir(parents=True)
    blob(cache, content).with_suffix(".incomplete").write_bytes(bytes(len(content) + 5))
    found, progress = pulled(cache)
    assert (found.folder / SHARDS[0]).read_bytes() == content
    assert progress.done == progress.total
    # A blob of another size, which some other tool has left, is not taken for the file either.
    blob(cache, content).write_bytes(content[:5])
    assert (pulled(cache)[0].folder / SHARDS[0]).read_bytes() == content


def test_the_token_goes_to_the_hub_alone(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.token = "hf_secret"
    pulled(cache)
    tokens = {server: {r.token for r in hub.requests if r.server == server} for server in ("hub", "cdn")}
    assert tokens == {"hub": {"Bearer hf_secret"}, "cdn": {None}}


def test_the_token_may_be_in_a_file(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.with_name("token")
    path.write_text("hf_secret\n")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(path))
    hub.token = "hf_secret"
    pulled(cache)


def test_a_gated_model_says_what_to_do(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token, hub.gated = "hf_right", True
    message = refusal(cache)
    assert message.startswith(f"{REPO} is gated: accept its terms at {hub.url}/{REPO}.")
    assert "No token was sent: set HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    message = refusal(cache)
    assert "is gated" in message
    assert "The token of HF_TOKEN was sent" in message
    assert "hf_wrong" not in message


def test_a_private_model_and_one_that_is_not_there(hub: HubDouble, cache: Path, monkeypatch) -> None:
    hub.token = "hf_right"
    assert "No token was sent" in refusal(cache)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not let this token read acme/tiny" in refusal(cache)
    hub.missing = True
    assert refusal(cache).startswith(f"there is no model at {hub.url}/{REPO}, or it is private.")
    monkeypatch.delenv("HF_TOKEN")
    assert "No token was sent" in refusal(cache)


def test_a_revision_that_is_not_there(hub: HubDouble, cache: Path) -> None:
    assert refusal(cache, HubModel(REPO, "v9")) == f"{hub.url}/{REPO} has no revision 'v9'"
    assert refusal(cache, HubModel(REPO, "9" * 40)) == f"{hub.url}/{REPO} has no revision '{'9' * 40}'"


def test_no_network(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_hub.client._wait_s", lambda error, failures: 0.01)
    use("http://127.0.0.1:9", monkeypatch)
    assert refusal(cache).startswith(f"cannot reach 127.0.0.1 to download {REPO}@main (ConnectError")
    use(hub.url, monkeypatch)
    pulled(cache)
    use("http://127.0.0.1:9", monkeypatch)
    found, progress = pulled(cache)
    assert found.commit == COMMIT
    assert "cannot reach" in progress.said[0]
    use("ftp://mirror", monkeypatch)
    assert "HF_ENDPOINT is 'ftp://mirror'" in refusal(cache)


def test_a_disk_that_is_too_small_is_not_filled(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1_234_567))
    assert refusal(cache) == f"the disk of {cache} has 1,234,567 bytes left, and 3,145,728 bytes are needed"
    assert not hub.downloads(SHARDS[0])
    # What is already there is not needed again.
    content = hub.files[SHARDS[0]]
    blob(cache, content).with_suffix(".incomplete").write_bytes(content[:2_000_000])
    pulled(cache)


def test_a_volume_that_is_too_small_is_not_filled(hub: HubDouble, cache: Path) -> None:
    message = refusal(cache, volume_size=3_000_000)
    assert message.startswith(f"{REPO}@main takes 3,146,920")
    assert message.endswith("bytes, and the volume holds 3,000,000 bytes")
    assert not hub.downloads(SHARDS[0])
    pulled(cache, volume_size=3_200_000)


def test_a_cache_that_cannot_be_written(hub: HubDouble, cache: Path) -> None:
    cache.write_text("a file")
    assert refusal(cache) == f"the cache {cache} cannot be used (Not a directory)"


def test_a_complete_cache_may_be_read_only(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(30, "Read-only file system")

    pulled(cache)
    monkeypatch.setattr(cache_module, "_write", refuse)
    hub.requests.clear()
    assert pulled(cache)[0].commit == COMMIT
    assert not hub.downloads("config.json")


def test_a_file_system_without_links(hub: HubDouble, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    found, _ = pulled(cache)
    assert (found.folder / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]
    hub.requests.clear()
    pulled(cache, PINNED)
    assert hub.requests == []


def test_models_that_baton_cannot_serve(hub: HubDouble, cache: Path) -> None:
    index = hub.files.pop(INDEX)
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(cache)
    hub.files[INDEX] = index
    shard = hub.files.pop(SHARDS[1])
    assert f"names '{SHARDS[1]}'" in refusal(cache.with_name("other"))
    hub.files[SHARDS[1]] = shard
    del hub.files["config.json"]
    assert "has no config.json" in refusal(cache.with_name("third"))


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "file", "oid": "1" * 40, "size": -1, "path": "config.json"},
        {"type": "file", "oid": "../../etc/passwd", "size": 1, "path": "config.json"},
        {"type": "file", "oid": "1" * 40, "size": 1, "lfs": {"oid": "1" * 40, "size": 1}, "path": "config.json"},
        {"type": "file", "oid": "1" * 40, "size": 1, "path": None},
        {"type": "file", "size": 1, "path": "config.json"},
        ["config.json"],
    ],
)
def test_a_listing_that_makes_no_sense_is_one_clear_text(hub: HubDouble, cache: Path, entry: object) -> None:
    hub.listed = [entry]
    assert f"{hub.url}/{REPO} gives no usable answer" in refusal(cache)


def test_names_that_lead_out_of_the_folder_are_not_read(hub: HubDouble, cache: Path) -> None:
    content = b"{}"
    names = ("../config.json", "/etc/config.json", "..\\x.jinja", "a/../../x.jinja", ".jinja", "x\n.jinja")
    hub.listed = [
        {"type": "file", "oid": git_oid(content), "size": 2, "path": name} for name in (*names, "config.json")
    ]
    hub.files["config.json"] = content
    found, _ = pulled(cache, weights=False)
    assert contents(found.folder).keys() == {"config.json"}
    assert {path.name for path in cache.parent.iterdir()} == {"cache"}


def test_a_long_listing_has_pages_at_the_hub(hub: HubDouble, cache: Path) -> None:
    path = f"/api/models/{REPO}/tree/{COMMIT}"
    hub.next_page = f"{hub.url}{path}?cursor=2"
    pulled(cache, weights=False)
    assert [request.path for request in hub.requests if "/tree/" in request.path] == [path, path]
    hub.next_page = f"{hub.cdn}{path}?cursor=2"
    assert "continues its answer at another address" in refusal(cache)
    assert not [request for request in hub.requests if request.server == "cdn"]


def test_a_listing_of_unlimited_length_is_not_read(hub: HubDouble, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr("baton_hub.client._LARGEST_ANSWER", 1000)
    hub.listed = [{"type": "file", "oid": "1" * 40, "size": 1, "path": "a" * 2000}]
    assert "answers with more than 1000 bytes" in refusal(cache)


def test_damaged_notes_in_the_cache_are_replaced(hub: HubDouble, cache: Path) -> None:
    pulled(cache, PINNED)
    [listing] = cache.rglob(f"listings/{COMMIT}.json")
    listing.write_text("{")
    pulled(cache, PINNED)
    assert json.loads(listing.read_text())["commit"] == COMMIT


def test_threads_that_pull_one_model_download_it_once(hub: HubDouble, cache: Path) -> None:
    hub.bytes_per_s = 4e6
    results: list[Pulled] = []
    threads = [threading.Thread(target=lambda: results.append(pulled(cache)[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.folder for result in results}) == 1
    assert [len(hub.downloads(name)) for name in SHARDS] == [1, 1]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_whose_name_is_that_of_another_one_by_now(cache: Path, monkeypatch, links: bool) -> None:
    """Another process makes the partial file the blob, and a third one begins anew, while this one does the former."""
    held, file = Cache(MODEL, cache), RemoteFile("a", 4, sha256(b"abcd"))
    held.prepare(0)
    partial, same = held.partial(file), os.path.samestat
    partial.write_bytes(b"abcd")
    descriptor = os.open(partial, os.O_RDWR)

    def another_comes_first(*stats: os.stat_result) -> bool:
        monkeypatch.undo()
        os.replace(partial, partial.with_suffix(""))
        partial.touch()
        return same(*stats)

    if links:
        monkeypatch.setattr(cache_module.os.path, "samestat", another_comes_first)
    else:
        monkeypatch.setattr(cache_module.os, "link", lambda *_, **__: os.stat("/nowhere"))
    held.complete(file, descriptor)
    os.close(descriptor)
    blobs = {path.name: path.read_bytes() for path in partial.parent.iterdir()}
    assert blobs == {file.hash: b"abcd"}


def test_two_at_a_time_end_well_where_locks_do_not_work(hub: HubDouble, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "_try_lock", lambda descriptor: True)
    hub.bytes_per_s = 4e6
    results: list[Pulled] = []
    threads = [threading.Thread(target=lambda: results.append(pulled(cache)[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert len(hub.downloads(SHARDS[0])) == 3
    for name in SHARDS:
        assert (results[0].folder / name).read_bytes() == hub.files[name]
