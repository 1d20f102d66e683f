"""Small random models, as transformers writes them, in which each token depends on the context."""

import math
from pathlib import Path
from typing import Any

import torch
import transformers

from loadtest.common.qwen_model import write_qwen

# The ratio of the spread of a product's outputs to that of its inputs: so large that the next token depends on the
# context, and so small that it does not depend on rounding.
LAYER_GAIN, HEAD_GAIN = 1.5, 3.0


def model_class(config: Any) -> Any:
    """Return the class of transformers that makes models with a head from a config. Some families have one for text and
    images alone."""
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText


def make_model(folder: Path, family: str, fields: dict[str, Any], seed: int) -> None:
    """Write a random model of a family, its configuration and weights as transformers itself writes them."""
    if family == "qwen":
        heads = {"num_key_value_heads": fields["num_attention_heads"]}
        make_model(folder / "reference", "qwen2", {**fields, **heads}, seed)
        write_qwen(folder, folder / "reference", torch_dtype="bfloat16")
        return
    if family == "dbrx":
        # Its class derives other sizes from d_model before it sees hidden_size, which is the same.
        fields = {**fields, "d_model": fields["hidden_size"]}
    # A head that is the embedding again mostly answers with the last token, whatever the layers compute.
    common = {"max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family, **common | fields)
    torch.manual_seed(seed)
    model = model_class(config).from_config(config)
    with torch.no_grad():
        embeddings = {
            f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)
        }
        corrections = [entry for entry in model.named_buffers() if entry[0].endswith("correction_bias")]
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                # Fresh tables give all tokens the same experts.
                scores = torch.rand(len(table), model.config.n_routed_experts)
                table.copy_(scores.topk(table.shape[1]).indices)
        for name, parameter in (*model.named_parameters(), *corrections):
            # Other buffers are not rounded: they are computed, but transformers reads them from the checkpoint.
            parameter.data = parameter.data.bfloat16()
            # Fresh biases are zero and fresh norms one: a model that lost either would give the same tokens.
            if name.endswith("bias"):
                # With much larger ones, all tokens get the same answer.
                parameter.normal_(std=0.2)
            elif name in embeddings or name.endswith("sinks"):
                parameter.normal_()
            elif "lambda_" in name:
                # The exponentials of products of larger ones overflow.
                parameter.normal_(std=0.1)
            elif name.endswith("A_log"):
                # Some states forget within a few tokens, others hardly.
                parameter.uniform_(-5.0, 1.0)
            elif name.endswith("recurrent_param"):
                parameter.uniform_(-9.0, 0.0)  # as above
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                gain = HEAD_GAIN if "lm_head" in name else LAYER_GAIN
                parameter.normal_(std=gain / math.sqrt(parameter.shape[1]))
    model.save_pretrained(folder)
