"""The measured engines. All have the same two methods."""

import contextlib
import itertools
import os
import random
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from baton_engine.models.registry import load_model_config
from loadtest.common.job import Job, Json
from loadtest.engine import device
from loadtest.engine.job_rows import rows_of
from loadtest.engine.rows import Row

TEMPERATURE = 0.6
MAX_MODEL_LEN = 4096
GPU_MEMORY_UTILIZATION = 0.9


class MeasuredEngine(ABC):
    """An engine that is ready. settings: those that it was created with."""

    settings: Json

    def __init__(self, job: Job) -> None:
        self._model_config = load_model_config(Path(job.model))
        self._rng = random.Random(job.seed)

    def adapt(self, row: Row) -> Row | None:
        """Return the row as this engine runs it, or None if the engine skips it."""
        longest = max(map(sum, zip(row.inputs, row.outputs, strict=True)))
        return row if longest <= self.settings.get("max_model_len", longest) else None

    def generate(self, inputs: list[int], outputs: list[int]) -> float:
        """Answer random prompts of these lengths, all at once; return the seconds until the last token.

        Raises RuntimeError when the answers do not have the requested lengths.
        """
        seconds, got = self._answer(self.random_prompts(inputs), outputs)
        if got != sum(outputs):
            raise RuntimeError(f"{got} tokens came back, {sum(outputs)} were asked for")
        return seconds

    def random_prompts(self, lengths: list[int]) -> list[list[int]]:
        high = min(30_000, self._model_config.vocab_size - 1)
        return [[self._rng.randint(min(10, high), high) for _ in range(length)] for length in lengths]

    @abstractmethod
    def _answer(self, prompts: list[list[int]], outputs: list[int]) -> tuple[float, int]:
        """Return the seconds and the number of generated tokens."""

    def _common_settings(self, job: Job) -> Json:
        return {
            "max_model_len": min(max(MAX_MODEL_LEN, _longest(job)), self._model_config.max_position_embeddings),
            "max_num_seqs": job.max_num_seqs,
            "max_num_batched_tokens": job.max_num_batched_tokens,
            "enable_prefix_caching": False,
        }


class Ours(MeasuredEngine):
    """Baton's engine in this process, set up as its worker does."""

    def __init__(self, job: Job) -> None:
        from baton_engine.config import EngineConfig
        from baton_engine.engine import Engine
        from loadtest.common.random_weights import random_weights_in_memory

        super().__init__(job)
        # All requests arrive at once, so no decode need be protected from long steps (chunk_ms = 0).
        self.settings = {"model": job.model, "dtype": "float32", "chunk_ms": 0.0, **self._common_settings(job)}
        if device.on_gpu():
            self.settings |= {"dtype": "bfloat16", "gpu_memory_utilization": GPU_MEMORY_UTILIZATION}
        self.settings |= job.ours
        if job.engine == "deterministic":
            self.settings["deterministic"] = True
        with random_weights_in_memory(job.seed) if job.weights_in_memory else contextlib.nullcontext():
            self.engine = Engine(EngineConfig(**self.settings))
        self._ids = itertools.count()

    def adapt(self, row: Row) -> Row | None:
        """Leave out decodes that cannot all run at the same time."""
        most_blocks, ends = self.engine.allocator.most_blocks, zip(row.inputs, row.outputs, strict=True)
        blocks = sum(most_blocks(inputs + outputs) for inputs, outputs in ends)
        return None if row.short and blocks > self.engine.pool.num_blocks else super().adapt(row)

    def add(self, prompts: list[list[int]], outputs: list[int]) -> None:
        """Queue requests. Raises ValueError when the engine refuses one."""
        from baton_engine.sampling import SamplingParams
        from baton_engine.sequence import Request

        for prompt, count in zip(prompts, outputs, strict=True):
            id = next(self._ids)
            sampling = SamplingParams(max_tokens=count, temperature=TEMPERATURE, seed=id)
            request = Request(id=id, prompt=prompt, sampling=sampling)
            error = self.engine.request_error(request)
            if error is not None:
                raise ValueError(": ".join(error))
            self.engine.add(request)

    def _answer(self, prompts: list[list[int]], outputs: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        self.add(prompts, outputs)
        got = 0
        while self.engine.has_work:
            got += sum(len(delta.tokens) for delta in self.engine.step().deltas)
        return time.perf_counter() - start, got


class Vllm(MeasuredEngine):
    """vLLM's offline class with random weights."""

    def __init__(self, job: Job) -> None:
        # FlashInfer compiles its sampler at the first use, which fails on a machine without network or compiler.
        for name, value in (
            ("HF_HUB_OFFLINE", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("VLLM_USE_FLASHINFER_SAMPLER", "0"),
            # Lets apply_model send a function to the engine's process.
            ("VLLM_ALLOW_INSECURE_SERIALIZATION", "1"),
        ):
            os.environ.setdefault(name, value)
        from vllm import LLM, SamplingParams

        super().__init__(job)
        self.settings = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
            "disable_log_stats": True,
            **self._common_settings(job),
            **job.vllm,
        }
        self._llm = LLM(model=job.model, **self.settings)
        if self.settings["load_format"] == "dummy":
            self._llm.apply_model(partial(_fill_weights, folder=Path(job.model)))
        self._params = SamplingParams

    def _answer(self, prompts: list[list[int]], outputs: list[int]) -> tuple[float, int]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        fields = {"temperature": TEMPERATURE, "ignore_eos": True, "detokenize": False}
        params = [self._params(max_tokens=count, **fields) for count in outputs]
        start = time.perf_counter()
        done = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, sum(len(output.outputs[0].token_ids) for output in done)


def _fill_weights(model: Any, folder: Path) -> None:
    """Give vLLM's model random weights as Baton's engine gets them.

    vLLM's dummy weights are the same in all layers, as each tensor begins with the same random numbers, and at most
    0.001. A router then sends most tokens to the same experts, so that a decode step reads only some of the weights.
    """
    import torch

    from baton_engine.quantization.registry import read_quantization
    from loadtest.common.random_weights import random_tensor

    quantization, generators = read_quantization(folder), dict[Any, Any]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Integers may be codes as well as an order of inputs, and only codes have names like these.
            if parameter.is_floating_point() or name.endswith(("weight", "weight_packed", "weight_scale")):
                where = parameter.device
                generator = generators.setdefault(where, torch.Generator(where).manual_seed(0))
                parameter.copy_(random_tensor(name, parameter.shape, parameter.dtype, quantization, generator))


class Transformers(MeasuredEngine):
    """Hugging Face generate() over static batches."""

    def __init__(self, job: Job) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__(job)
        self._device = "cuda" if device.on_gpu() else "cpu"
        dtype = torch.bfloat16 if device.on_gpu() else torch.float32
        self.settings = {"dtype": str(dtype), "do_sample": False}
        torch.manual_seed(job.seed)
        with torch.device(self._device):
            config = AutoConfig.from_pretrained(job.model)
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None

    def adapt(self, row: Row) -> Row | None:
        if max(row.inputs) > MAX_MODEL_LEN:
            return None
        if row.key in ("decode-1", "decode-32", "decode-128"):
            count = len(row.inputs)
            return replace(row, outputs=[row.short + min(32, row.outputs[0] - row.short)] * count, repeats=1)
        if row.key == "prefill":
            return replace(row, inputs=row.inputs[:16], outputs=row.outputs[:16])
        return replace(row, repeats=min(row.repeats, 3)) if row.key.startswith("first") else None

    def _answer(self, prompts: list[list[int]], outputs: list[int]) -> tuple[float, int]:
        import torch

        ids = torch.tensor(prompts, device=self._device)
        device.synchronize()
        start = time.perf_counter()
        result = generate_greedily(self._model, ids, outputs[0])
        device.synchronize()
        return time.perf_counter() - start, result[:, ids.shape[1] :].numel()


def generate_greedily(model: Any, ids: Any, count: int) -> Any:
    """Return [batch, length + count]: prompts of one length, each followed by the tokens that the model generates."""
    import torch

    with torch.inference_mode():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
        )


def _longest(job: Job) -> int:
    """Return the tokens of the longest request of a job."""
    return max(map(sum, (pair for row in rows_of(job) for pair in zip(row.inputs, row.outputs, strict=True))))


ENGINES: dict[str, type[MeasuredEngine]] = {
    "ours": Ours, "deterministic": Ours, "vllm": Vllm, "transformers": Transformers
}  # fmt: skip
