"""The file with the tokens by which pods recognise each other."""

import hmac
import logging
from pathlib import Path

import pytest

from baton_common import peer_token
from baton_common.peer_refusals import PeerRefusals
from baton_common.peer_token import PeerToken, PeerTokenError
from baton_prefill.settings import PrefillSettings
from tests.peer_files import write_tokens

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


def test_without_a_file_nobody_needs_a_token():
    assert PrefillSettings(model=Path()).peer_token is None


def test_the_first_token_is_shown_and_all_are_accepted(tmp_path: Path):
    token = PeerToken(write_tokens(tmp_path / "tokens", NEW, "", f"  {OLD} "))
    assert token.shown == NEW
    assert token.accepts(NEW)
    assert token.accepts(OLD.encode())
    for wrong in ("", NEW[:-1], f"{NEW}x", f"{NEW}\n{OLD}", "é", b"\xff"):
        assert not token.accepts(wrong)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no token"),
        (b"\n \n", "no token"),
        (b"fifteen-letters", "token 1 must have 16 to 1024"),
        (b"%s\nshort" % OLD.encode(), "token 2 must have"),
        (b"x" * 1025, "token 1 must have"),
        (b"with a blank in-the-middle", "printable ASCII"),
        (b"not-ascii-\xc3\xa9-0123456789", "printable ASCII"),
        (b"secret-that-is-long\n" * 1000, "larger than"),
    ],
)
def test_a_file_of_no_use_is_refused_without_being_quoted(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(PeerTokenError, match=reason) as refused:
        PeerToken(path)
    assert str(path) in str(refused.value)
    for line in content.decode(errors="replace").split():
        assert len(line) < 5 or line not in str(refused.value)


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str):
    with pytest.raises(PeerTokenError, match=str(tmp_path)):
        PeerToken(tmp_path / name)


def test_a_new_file_is_taken_up_and_a_bad_one_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    path = write_tokens(tmp_path / "tokens", OLD)
    token = PeerToken(path)
    write_tokens(path, OLD, NEW)
    assert token.shown == OLD
    assert token.accepts(NEW)
    write_tokens(path, NEW)
    assert token.shown == NEW
    assert not token.accepts(OLD)
    write_tokens(path, "too-short")
    assert token.accepts(NEW)
    path.unlink()
    assert token.accepts(NEW)
    write_tokens(path, OLD)
    assert token.shown == OLD
    events = [record.__dict__["event"] for record in caplog.records]
    assert events[:3] == ["peer_token_replaced", "peer_token_replaced", "peer_token_refused"]
    assert not any(secret in caplog.text for secret in (OLD, NEW, "too-short"))


def test_a_missing_file_is_logged_once_and_not_at_each_call(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write_tokens(tmp_path / "tokens", OLD)
    token = PeerToken(path)
    path.unlink()
    assert all(token.accepts(OLD) for _ in range(50))
    assert len(caplog.records) == 1


def test_every_token_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    token = PeerToken(write_tokens(tmp_path / "tokens", NEW, OLD))
    compared: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return original(one, other)

    monkeypatch.setattr(peer_token.hmac, "compare_digest", compare)
    assert token.accepts(NEW)
    assert not token.accepts("x")
    assert len(compared) == 4
    assert {len(part) for pair in compared for part in pair} == {32}


def test_settings_do_not_show_the_token(tmp_path: Path):
    settings = PrefillSettings(model=Path(), peer_token_file=write_tokens(tmp_path / "tokens", OLD))
    assert settings.peer_token is not None
    for text in (repr(settings), settings.model_dump_json(), repr(settings.peer_token), str(vars(settings))):
        assert OLD not in text


def test_a_flood_of_strangers_is_counted_but_not_logged_line_by_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    now = 1000.0
    monkeypatch.setattr("baton_common.peer_refusals.time.monotonic", lambda: now)
    refusals = PeerRefusals()
    for _ in range(5000):
        refusals.add("grpc", "ipv4:10.0.0.1:5", "the call has no peer token")
    assert len(caplog.records) == 10
    now += 61
    refusals.add("bulk", "10.0.0.1:5", "no session has the token that was shown")
    assert [record.getMessage() for record in caplog.records[10:]] == [
        "4990 more refusals were not logged",
        "refused 10.0.0.1:5: no session has the token that was shown",
    ]
    assert refusals.counts == {"grpc": 5000, "bulk": 1}
