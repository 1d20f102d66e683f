"""A model folder with random weights and a random tokenizer."""

from pathlib import Path

from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import load_model_config
from loadtest.common.random_tokenizer import write_random_tokenizer
from loadtest.common.random_weights import write_random_weights


def write_random_model(folder: Path, config: str, seed: int) -> ModelConfig:
    """Make a model in a folder, which may not exist yet, and return its configuration.

    config: the text of its config.json. Weights that the folder already has are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    model = load_model_config(folder)
    write_random_tokenizer(folder, model.vocab_size)
    if not any(folder.glob("*.safetensors")):
        write_random_weights(folder, seed)
    return model
