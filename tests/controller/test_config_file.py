"""Valid and invalid configuration files of the controller, and the messages about their errors."""

from pathlib import Path

import pytest

from baton_controller.config_file import ConfigFileError, read_config

FULL = """
models:
  llama:
    canary: {revision: canary, stable: stable, steps: [5, 25, 50, 100], intervalSeconds: 60, minRequests: 50,
             maxTtftP95Ratio: 1.2, maxTpotP95Ratio: 1.2, maxErrorRateIncrease: 0.01, generation: 3}
    scaler: {prefill: {deployment: p, min: 1, max: 8}, decode: {deployment: d, min: 1, max: 8},
             ttftSloSeconds: 2.0, tpotSloSeconds: 0.05, dryRun: false, mode: metrics}
  qwen: {}
"""


def test_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text(FULL)
    models = read_config(path).models
    assert models["llama"].canary is not None
    assert (models["llama"].canary.steps, models["llama"].canary.generation) == ((5, 25, 50, 100), 3)
    assert models["llama"].scaler is not None
    assert (models["llama"].scaler.mode, models["llama"].scaler.decode.deployment) == ("metrics", "d")
    assert models["qwen"].canary is None


def test_an_empty_file_has_no_models(tmp_path: Path) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text("")
    assert read_config(path).models == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("minRequests", "minRequest"), "`minRequest` - at `$.models[...].canary`"),
        (("[5, 25, 50, 100]", "[5, 50, 25]"), "model llama: canary.steps: [5, 50, 25] do not rise"),
        (("[5, 25, 50, 100]", "[]"), "canary.steps"),
        (("[5, 25, 50, 100]", "[5, 101]"), "canary.steps"),
        (("stable: stable", "stable: canary"), "canary.revision: 'canary' is the stable one"),
        (("deployment: p, min: 1", "deployment: p, min: 9"), "scaler.prefill: min 9 is more than max 8"),
        (("deployment: p", "deployment: d"), "'d' cannot be both"),
        (("mode: metrics", "mode: hope"), "scaler.mode"),
        (("models:", "models: ["), "controller.yaml: "),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text(FULL.replace(*change))
    with pytest.raises(ConfigFileError) as raised:
        read_config(path)
    assert message in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.yaml")
