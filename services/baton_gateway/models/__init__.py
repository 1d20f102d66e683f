"""What the gateway reads from the folder of a model: tokenizer, chat template, defaults."""
