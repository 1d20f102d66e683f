"""Trains the demo model from the corpus: python -m baton_demo.train [--out DIR] [--minutes N]."""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from baton_demo import MODEL_DIR
from baton_demo.batches import IGNORED, Batch, batches, encode
from baton_demo.chat import BOS, END, EOS, PAD, Segment, turn
from baton_demo.corpus import Corpus
from baton_demo.samples import Sampler
from baton_demo.tokenizer import VOCAB_SIZE, save_tokenizer, token_id, train_tokenizer

SEED = 7
STEPS = 1200
MINUTES = 20.0
MAX_POSITIONS = 8192
PEAK_LR = 3e-3
WARMUP = 60


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=[token_id(tokenizer, EOS), token_id(tokenizer, END)],
        pad_token_id=token_id(tokenizer, PAD),
    )
    return LlamaForCausalLM(config)


def logits_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Return logits [rows, columns, vocabulary].

    The explicit mask is needed: without one, transformers treats a jump in the positions as a new packed sequence.
    """
    mask = torch.ones_like(batch.ids)
    output = model(input_ids=batch.ids, position_ids=batch.positions, attention_mask=mask, use_cache=False)
    logits: torch.Tensor = output.logits
    return logits


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    logits = logits_of(model, batch)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)


def learning_rate(step: int, progress: float) -> float:
    return PEAK_LR * min(1.0, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * progress))


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus, steps: int, minutes: float) -> None:
    """Train for a fixed number of steps, so that runs are reproducible, or until `minutes` are over on a slow machine.

    The learning rate falls with the larger share of the two limits that has been used.
    """
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)
    stream = batches(Sampler(corpus, SEED), tokenizer, MAX_POSITIONS, SEED)
    start = time.monotonic()
    mean_loss = 0.0
    for step, batch in zip(range(steps), stream, strict=False):
        progress = max(step / steps, (time.monotonic() - start) / (60 * minutes))
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss += (loss.item() - mean_loss) / min(step + 1, 50)
        if step % 50 == 0:
            elapsed = (time.monotonic() - start) / 60
            print(f"step {step}/{steps}  {progress:4.0%}  loss {mean_loss:.3f}  {elapsed:.1f} min", flush=True)


@torch.no_grad()
def recall(model: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus) -> float:
    """Return the share of facts whose first question greedy decoding answers to the letter."""
    rows = []
    for fact in corpus.facts:
        sample = [[Segment(BOS), *turn("user", fact.questions[0]), *turn("assistant", fact.answer)]]
        rows.append(encode(sample, tokenizer, [0]))
    batch = Batch.of(rows, token_id(tokenizer, PAD))
    expected = batch.labels[:, 1:]
    right = logits_of(model, batch)[:, :-1].argmax(-1) == expected
    return (right | (expected == IGNORED)).all(dim=1).float().mean().item()


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokens = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig.from_dict({**tokens, "do_sample": False})
    model.bfloat16().save_pretrained(out)
    # Versions before transformers 5 read the dtype and the rope base only under these names.
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"torch_dtype": "bfloat16", "rope_theta": config["rope_parameters"]["rope_theta"]}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, out, MAX_POSITIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder for the model (default: the one shipped)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of the training (default: 20)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps (default: {STEPS})")
    options = parser.parse_args()

    torch.manual_seed(SEED)
    # Floating-point sums depend on the number of threads, so a fixed number makes runs reproducible.
    torch.set_num_threads(2)
    corpus = Corpus.load()
    tokenizer = train_tokenizer(corpus.texts())
    model = build_model(tokenizer)
    print(f"{len(corpus.facts)} facts, {model.num_parameters():,} parameters")
    train(model, tokenizer, corpus, options.steps, options.minutes)
    print(f"answered to the letter: {recall(model, tokenizer, corpus):.0%}")
    save(model, tokenizer, options.out)
    print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
