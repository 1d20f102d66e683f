"""The services accept the command lines of a layout."""

from pathlib import Path

import pytest

from baton_cli.layout import Layout
from baton_cli.ports import Address
from baton_cli.service_settings import settings_from
from baton_cli.spec import ChildSpec
from baton_decode.settings import DecodeSettings
from baton_gateway.settings import GatewaySettings
from baton_prefill.settings import PrefillSettings

WORKER_FLAGS = (
    *("--log-level", "warning", "--dtype", "bfloat16", "--block-size", "32", "--num-blocks", "99"),
    *("--max-model-len", "512", "--max-num-batched-tokens", "256", "--no-enable-prefix-caching"),
    *("--gpu-memory-utilization", "0.5", "--max-num-seqs", "64"),
)


def flags(spec: ChildSpec) -> tuple[str, ...]:
    return spec.argv[spec.argv.index("baton_cli") + 2 :]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(
        model=str(tmp_path),
        served_model_name="name",
        public=Address("0.0.0.0", 8123),
        admin=Address("127.0.0.1", 9123),
        prefill=1,
        decode=2,
        worker_flags=WORKER_FLAGS,
        gateway_flags=("--log-level", "warning"),
        api_keys=("sk-one", "sk-two"),
    )


def test_the_gateway_accepts_its_flags_and_keys(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    [[gateway], _] = layout.in_shutdown_order([1001, 1002, 1003], [2001, 2002, 2003])
    for name, value in gateway.env.items():
        monkeypatch.setenv(name, value)
    settings = settings_from(flags(gateway), GatewaySettings, "baton gateway")
    assert settings.served_model_name == "name"
    assert (settings.host, settings.port) == ("0.0.0.0", 8123)
    assert settings.prefill_addresses == ["127.0.0.1:1001"]
    assert settings.decode_addresses == ["127.0.0.1:1002", "127.0.0.1:1003"]
    assert [key.get_secret_value() for key in settings.api_keys] == ["sk-one", "sk-two"]
    assert (settings.admin_host, settings.admin_port) == ("127.0.0.1", 9123)
    assert settings.log_level == "warning"
    assert settings.shutdown_grace_s < gateway.grace_s


def test_workers_accept_theirs(layout: Layout, tmp_path: Path) -> None:
    _, [*decodes, prefill] = layout.in_shutdown_order([1001, 1002, 1003], [2001, 2002, 2003])
    read = [settings_from(flags(prefill), PrefillSettings, "baton prefill")]
    read += [settings_from(flags(spec), DecodeSettings, "baton decode") for spec in decodes]
    assert [settings.port for settings in read] == [1001, 1002, 1003]
    assert [settings.metrics_port for settings in read] == [2001, 2002, 2003]
    for settings in read:
        assert (settings.host, settings.model, settings.served_model_name) == ("127.0.0.1", tmp_path, "name")
        assert (settings.dtype, settings.block_size, settings.num_blocks) == ("bfloat16", 32, 99)
        assert (settings.max_model_len, settings.max_num_batched_tokens) == (512, 256)
        assert (settings.gpu_memory_utilization, settings.max_num_seqs) == (0.5, 64)
        assert settings.enable_prefix_caching is False
        assert settings.log_level == "warning"
