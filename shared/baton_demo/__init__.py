"""The demo model: a tiny Llama that answers questions about Baton, so that a first request needs no download."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""A Hugging Face model folder: config, bfloat16 safetensors weights, tokenizer and chat template."""
