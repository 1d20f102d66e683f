"""The files with which pods speak TLS with each other, and the settings that name them."""

import logging
from pathlib import Path

import pytest
import trustme

from baton_cli.errors import BadSetting
from baton_cli.service_settings import settings_from
from baton_common.peer_tls import PeerTls, PeerTlsError
from baton_decode.settings import DecodeSettings
from baton_prefill.settings import PrefillSettings
from tests.peer_files import NAME, PeerFiles


@pytest.mark.parametrize("given", [["cert"], ["cert", "key"], ["ca"], ["key", "ca"]])
def test_settings_have_all_files_or_none(given: list[str]):
    args = ["--model", "m", *(f"--peer-tls-{kind}-file=/x" for kind in given)]
    with pytest.raises(BadSetting, match="peer_tls_ca_file: give all three or none"):
        settings_from(args, PrefillSettings, "baton prefill")


def test_without_files_there_is_no_tls():
    assert PrefillSettings(model=Path()).peer_tls is None


def test_kv_leaves_nccl_out_unless_it_is_asked_for(tmp_path: Path):
    files = PeerFiles(tmp_path).settings
    assert DecodeSettings(model=Path()).gpu_pairs
    assert not DecodeSettings(model=Path(), **files).gpu_pairs
    assert DecodeSettings(model=Path(), kv_transport="nccl", **files).gpu_pairs


@pytest.mark.parametrize("missing", ["chain", "key", "roots"])
def test_files_that_are_not_there_are_named(tmp_path: Path, missing: str):
    files = PeerFiles(tmp_path)
    path: Path = getattr(files, missing)
    path.unlink()
    with pytest.raises(PeerTlsError, match=str(path)):
        files.load()


def test_files_with_which_no_pod_could_reach_another_are_refused(tmp_path: Path):
    files = PeerFiles(tmp_path)
    with pytest.raises(PeerTlsError, match="not valid for 'other-peer'"):
        PeerTls(files.chain, files.key, files.roots, "other-peer")
    with pytest.raises(PeerTlsError) as named:
        PeerTls(files.chain, files.key, files.roots, "baton-peer.llm")
    assert "issue the certificate for the DNS name 'baton-peer.llm', or set --peer-tls-name (peerTls.name" in str(
        named.value
    )
    files.roots.write_bytes(trustme.CA().cert_pem.bytes())
    with pytest.raises(PeerTlsError, match="certificate verify failed") as unknown:
        files.load()
    assert "peer-tls-name" not in str(unknown.value)
    files.roots.write_bytes(b"nothing")
    with pytest.raises(PeerTlsError):
        files.load()


def test_a_key_of_another_certificate_is_refused(tmp_path: Path):
    files = PeerFiles(tmp_path)
    secret = files.authority.issue_cert(NAME).private_key_pem.bytes()
    files.key.write_bytes(secret)
    with pytest.raises(PeerTlsError, match="mismatch") as refused:
        files.load()
    assert secret.splitlines()[1].decode() not in str(refused.value)


def test_a_renewed_certificate_for_another_name_says_what_to_set(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files = PeerFiles(tmp_path)
    tls = files.load()
    files.name = "rel-peer.ns"
    files.renew()
    tls.refresh()
    [record] = caplog.records
    assert record.__dict__["event"] == "peer_certificate_refused"
    assert "DNS name 'baton-peer', or set --peer-tls-name" in record.getMessage()


def test_what_cannot_be_used_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    files = PeerFiles(tmp_path)
    tls = files.load()
    before = tls.server_context(), tls.client_context()
    files.key.write_bytes(files.authority.issue_cert(NAME).private_key_pem.bytes())
    assert (tls.renewals, tls.server_context(), tls.client_context()) == (0, *before)
    files.renew()
    assert tls.renewals == 1
    assert tls.server_context() is not before[0]
    assert tls.client_context() is not before[1]
    events = [record.__dict__["event"] for record in caplog.records]
    assert events == ["peer_certificate_refused", "peer_certificate_replaced"]
