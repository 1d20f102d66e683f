"""Several processes that divide the layers of a model give the tokens of one, and of transformers."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton_engine.config import ConfigError, EngineConfig
from baton_engine.executor import RanksFence, StepMark
from baton_engine.fingerprint import layout_fingerprint
from baton_engine.ranks import executor
from baton_engine.ranks.messages import DrawMasked, Launch, Start, decode, encode
from baton_engine.ranks.processes import RankDied
from baton_engine.ranks.ring import RingReader, RingWriter, create_counter, create_memory
from baton_engine.sampling import Grammar, GrammarKind
from baton_engine.step_plan import NewRow, StepPlan
from baton_engine.stored_scales import save_scales
from tests.conftest import MakeModel
from tests.models import is_greedy
from tests.quantized import compress
from tests.rounded_kv import rounded_choices

from .handover import Pair
from .harness import Transcript, assert_idle, generate, make_engine, make_prompt, make_request, make_various_requests
from .pools import MakeEngine, Pools
from .test_equality import SHAPES
from .test_quantized_models import SCHEMES, scheme

ALL_RANKS = bool(os.environ.get("ALL_RANKS"))  # each family with 2 and with 4 ranks, instead of one of these
# Each family; with fewer key-value heads than ranks, as many and more; biases in all places; fused and tied weights.
FAMILIES = (
    "llama-plain", "llama-biases-llama3", "mistral-window", "qwen", "qwen2-tied", "qwen3-tied-bias-yarn", "bloom-tied",
    "bloom-twelve-heads-residual-after-norm-untied", "gemma2-tied", "gemma3-tied", "granite-biases", "smollm3", "olmo2",
    "mixtral-window", "qwen2-moe-dense-layer-normalized", "qwen3-moe", "olmoe", "gpt-oss", "glm4-moe-groups",
    "glm4-moe-dense-layers-biases", "deepseek-v2-lite", "deepseek-v3-groups", "phi3-a-part-rotated-tied", "falcon-7b",
    "falcon-40b", "falcon-in-turn", "gpt2", "gpt-neox", "gemma", "glm4-half-heads", "olmo-limited", "olmo3-yarn",
    "cohere-norms-untied", "cohere2", "starcoder2-window", "stablelm-parallel-norms", "phi", "nemotron", "arcee",
    "seed-oss", "ernie4-5-biases", "ernie4-5-moe", "exaone4-windows", "ministral", "minimax-m2", "dots1",
    "ministral3-growth", "glm4-moe-lite", "exaone-moe", "flex-olmo", "kimi-k2-5", "gemma3-and-images", "qwen3-vl",
    "granitemoe-shared", "hunyuan-alpha", "hunyuan-moe", "opt", "gptj", "codegen", "gpt-bigcode",
    "gpt-bigcode-a-key-per-head", "mpt-limited-twelve-heads", "phimoe-biases", "dbrx", "apertus-biases-llama3",
    "helium-biases", "vaultgemma", "persimmon", "xglm", "llama4", "llama4-and-images",
    "gpt-neo", "nanochat-biases", "hyperclovax", "youtu", "mellum", "afmoe", "afmoe-biases",
    "hy3", "axk1", "granite-swash", "granite-swash-experts", "mistral4", "minicpm3", "command-a-plus",
    "glm-ocr", "paddleocr-vl", "biogpt", "gpt-neox-japanese",
    "gemma4-tied", "gemma4-values-biases", "gemma4-experts-untied", "gemma4-and-images",
    "gemma4-small", "gemma4-small-one-key", "gemma3n", "gemma3n-untied-sizes",
    "aria", "longcat-flash", "deepseek-ocr2-groups", "ernie4-5-vl", "molmo2", "molmo2-olmo", "muse-glimmer-biases",
    "glm", "granitemoe", "cwm-llama3", "jais2", "solar-open", "mllama", "cohere-compass",
    "chameleon-norms-after-biases", "fuyu", "kolibri1", "flint", "flint-biases-dense-layers", "laguna",
    "laguna-biases-a-gate-per-element", "deepseek-v32", "glm-5-shared-selections", "step3p7", "muse-spark",
    "ctrl", "doge", "doge-biases-window-yarn-tied", "modernbert-decoder-biases-tied", "hrm-text",
    "hrm-text-more-cycles-linear", "ouro", "ouro-tied-two-passes-linear", "plamo3",
    "plamo3-yarn",
    "bitnet-biases-llama3", "openai-gpt", "jetmoe", "diffllama", "mimo-v2-flash", "mimo-v2-flash-biases-groups",
    "falcon-alibi", "opt-350m", "internlm2-biases-linear", "internlm3-biases", "internlm-biases", "exaone-llama3",
    "orion", "mimo", "aquila", "pangu-embedded-biases", "chatglm", "chatglm-a-key-per-head-far", "baichuan",
    "baichuan-2", "minicpm", "deepseek-moe-biases-every-second-layer", "ling-biases-normed-head", "ling-2",
    "ling-2-biases-one-group", "telechat", "telechat-groups-tied-longer", "nemotron-super",
    "minicpm-v-2", "minicpm-v-4-5", "phi3-v-su", "molmo", "molmo-olmo", "phi-head-norms-tied", "opt-no-final-norm",
    "deepseek-v2-biases-plain-queries", "ernie4-5-moe-biases-tied", "llama4-two-experts", "olmoe-limited", "phi4-mm",
    "teleflm", "axk2", "axk2-groups-gelu", "beam", "beam-biases-tied", "mistral-large-4",
    "mistral-large-4-shared", "lfm2-biases-longer", "lfm2-moe", "lfm3", "granite-4-unrotated",
    "qwen3-5-moe", "qwen3-next", "granite-4-mamba-biases-groups", "granite-4-mamba",
    "bamba-biases-groups", "nemotron-h", "falcon-h1-biases-norms", "olmo-hybrid", "olmo-hybrid-unrotated", "falcon-h1",
    "kimi-linear", "nemotron-h-latent-experts-first-biases", "nemotron-h-experts-groups", "minimax-without-factors",
    "ling3", "jamba-biases-no-experts", "jamba-experts-in-each-layer", "mamba-biases-longer-untied", "falcon-mamba",
    "mamba2", "mamba2-biases-a-group-longer", "hy4-shared-selections", "hy4-low-limit", "minimax-m3", "zamba2",
    "zamba2-adapters-of-attention-biases", "recurrent-gemma-biases-longer-untied", "dots3-note",
    "dots3-note-text-part-alone", "deepseek-v4", "glm5-next", "glm5-next-unbounded-low-limit",
)  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_tokens_of_transformers(tiny_model: MakeModel, divided: MakeEngine, name: str) -> None:
    family, overrides = SHAPES[name]
    folder = tiny_model(family, **overrides)
    prompts = [make_prompt(length, seed=3) for length in (17, 50)]
    for ranks in (2, 4) if ALL_RANKS else (2 + 2 * (FAMILIES.index(name) % 2),):
        engine = divided(folder, ranks, max_num_batched_tokens=40)
        transcript = generate(engine, [make_request(id, prompt, 8) for id, prompt in enumerate(prompts)])
        for id, prompt in enumerate(prompts):
            assert len(transcript.tokens[id, 0]) == 8
            assert is_greedy(folder, prompt, transcript.tokens[id, 0])
        assert_idle(engine)


@pytest.mark.parametrize("ranks", [2, 4])
def test_choices_caches_preemption_and_parameters(windowed: Path, divided: MakeEngine, ranks: int) -> None:
    common = make_prompt(40, seed=1)
    requests = make_various_requests(common)
    settings = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 24, "max_model_len": 100}
    one = generate(make_engine(windowed, **settings), requests)
    engine = divided(windowed, ranks, **settings)
    several = generate(engine, requests)
    assert several.tokens == one.tokens
    assert several.reasons == one.reasons
    assert engine.load().preemptions
    for id, cached in ((10, 0), (11, 48)):
        again = generate(engine, [make_request(id, common + make_prompt(9), 8)])
        assert again.first(id).cached_tokens == cached
        assert is_greedy(windowed, common + make_prompt(9), again.tokens[id, 0])
    [probabilities], [expected] = (
        [delta.prompt_logprobs for delta in transcript.deltas if delta.prompt_logprobs] for transcript in (several, one)
    )
    assert [each.token_id for each in probabilities] == [each.token_id for each in expected]
    assert [each.logprob for each in probabilities] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert_idle(engine)


@pytest.mark.parametrize("model", ["windowed", "latent", "two_head_sizes", "shared_kv"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4)])
def test_kv_goes_between_engines_of_any_number_of_ranks(
    divided: MakeEngine, request: pytest.FixtureRequest, model: str, prefill: int, decode: int
) -> None:
    folder = request.getfixturevalue(model)
    pair = Pair(
        divided(folder, prefill, max_num_batched_tokens=24, num_blocks=512, block_size=8),
        divided(folder, decode, num_blocks=256),
        seed=prefill + decode,
    )
    prompts = [make_prompt(length, seed=4) for length in (1, 16, 61, 90)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 12))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        assert is_greedy(folder, prompt, transcript.tokens[id, 0])
    assert pair.prefill.fingerprint_facts() == pair.decode.fingerprint_facts()
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


@pytest.mark.parametrize("how", ["measured", "stored"])
@pytest.mark.parametrize(("family", "prefill", "decode"), [("llama", 1, 2), ("gpt_oss", 2, 4), ("falcon", 2, 1)])
def test_kv_in_8_bits(
    tiny_model: MakeModel, divided: MakeEngine, tmp_path: Path, how: str, family: str, prefill: int, decode: int
) -> None:
    """Heads of keys are as many as the ranks, or several ranks have the same one."""
    folder = tiny_model(family)
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    alone = make_engine(folder, **settings)
    scales = alone.runner.cache.scales
    if how == "stored":
        for layer in range(len(scales)):
            # Each head has a scale that no other one has.
            heads = scales[layer].shape[1]
            scales.set(layer, scales[layer] * torch.linspace(1, 2, 2 * heads).view(2, heads), slice(0, heads))
        save_scales(scales, tmp_path / "scales.safetensors")
        settings["kv_scales"] = str(tmp_path / "scales.safetensors")
    engines = divided(folder, prefill, max_num_batched_tokens=24, **settings), divided(folder, decode, **settings)
    for engine in engines:
        assert engine.runner.cache.facts == alone.runner.cache.facts
        assert layout_fingerprint(engine.fingerprint_facts(), folder) == layout_fingerprint(
            engines[0].fingerprint_facts(), folder
        )
    pair = Pair(*engines, seed=prefill)
    prompts = [make_prompt(length, seed=4) for length in (1, 16, 61)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 12))
    transcript = pair.run()
    each = [scales[layer].clone() for layer in range(len(scales))]
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert tokens == rounded_choices(folder, prompt, tokens, each)
    for engine in engines:
        assert_idle(engine)


def test_layers_are_reported_with_a_fence_for_each_rank() -> None:
    processes, own = SimpleNamespace(), SimpleNamespace()
    step: Any = SimpleNamespace(layers_ready=lambda: (4, own))
    assert executor._Launched(step, processes, 3).layers_ready() == (4, RanksFence(StepMark(3, 4), own))  # type: ignore[arg-type]


def test_a_number_that_is_not_finite_stays_in_its_request(llama: Path, divided: MakeEngine) -> None:
    engine = divided(llama, 2)
    engine.runner._runner._model.embedding.weight[5] = float("nan")  # of rank 0, but all ranks compute with it
    prompts = [7, 5, 9], [7, 8, 9]
    for id, prompt in enumerate(prompts):
        engine.add(make_request(id, prompt, 8))
    transcript, broken = Transcript(), []
    while engine.has_work:
        result = engine.step()
        broken += result.broken
        transcript.take(result.deltas)
    assert broken == [0]
    assert 5 not in transcript.tokens[1, 0]
    assert is_greedy(llama, prompts[1], transcript.tokens[1, 0])


@pytest.mark.parametrize("name", ["int4 weights", "int8"])
def test_quantized_weights(tiny_model: MakeModel, divided: MakeEngine, tmp_path: Path, name: str) -> None:
    base = tiny_model("llama", hidden_size=128, intermediate_size=256)
    folder, plain = compress(base, tmp_path / "model", {"group_0": scheme(name)}, ["lm_head"])
    prompt = make_prompt(37)
    one, two = (generate(divided(folder, ranks), [make_request(0, prompt, 12)]).tokens[0, 0] for ranks in (1, 2))
    if SCHEMES[name][1] is None:
        assert is_greedy(plain, prompt, two)
    # Where activations are rounded, each rank has its own scale for them.
    assert two[:4] == one[:4]


@pytest.mark.parametrize(
    ("family", "overrides", "ranks", "message"),
    [
        ("llama", {}, 3, "4 attention heads cannot be divided among 3 ranks"),
        ("llama", {}, 8, "--tensor-parallel 8 is more than the 4 attention heads"),
        ("llama", {"intermediate_size": 95}, 2, r"layers\.0\.mlp\.down_proj: 95 inputs cannot be divided"),
        ("falcon", {"num_attention_heads": 6, "hidden_size": 96, "num_kv_heads": 3, "new_decoder_architecture": True},
         2, "3 key-value heads cannot be divided among 2 ranks"),
        ("deepseek_v4", {"o_groups": 2}, 4, r"--tensor-parallel 4 does not divide the 2 groups of heads \(o_groups"),
        ("recurrent_gemma", {}, 2, "--tensor-parallel 2 does not divide the 1 key-value heads, among which the states"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(
    tiny_model: MakeModel, divided: MakeEngine, family: str, overrides: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        divided(tiny_model(family, **overrides), ranks)


def test_a_rank_that_cannot_load_its_part_is_named(
    llama: Path, divided: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(config: EngineConfig, *others: Any) -> Start:
        return Start(msgspec.structs.replace(config, model=str(tmp_path)), *others)

    monkeypatch.setattr("baton_engine.ranks.processes.Start", elsewhere)
    with pytest.raises(ConfigError, match=rf"rank 1 of 2: .*{tmp_path}"):
        divided(llama, 2)


def test_a_rank_that_others_wait_for_is_named(llama: Path, pools: Pools, divided: MakeEngine) -> None:
    engine = divided(llama, 2)
    ranks = pools.take(2, 1)
    # Rank 0 seems to have begun an operation of all ranks, which the other one never reaches.
    ranks._board.work(0)
    until = time.monotonic() + 10
    while not pools.problems and time.monotonic() < until:
        time.sleep(0.05)
    assert pools.problems == ["rank 1 of 2 hangs: all others wait for it"]
    pools.problems.clear()
    with pytest.raises(RankDied, match="rank 1 of 2 hangs"):
        generate(engine, [make_request(0, make_prompt(5))])
    ranks.close()


def test_commands_are_the_same_on_the_other_side() -> None:
    request = make_request(0, [1, 2], logit_bias={3: 1.5}, grammar=Grammar(GrammarKind.REGEX, "a"), bad_words=[[4, 5]])
    blocks = np.array([[1, 2], [3, 4]], dtype=np.int32)
    row = NewRow(row=3, prompt=[1, 2], output=[6], blocks=blocks, sampling=request.sampling, choice=1)
    plan = StepPlan([3], [2], [3], [1], 2, False, [row], [(3, 0, 1, 9)], [(1, 2)], [0], [(0, 1)], [2])
    sent = decode(encode(Launch(plan)))
    assert isinstance(sent, Launch)
    assert np.array_equal(sent.plan.new_rows[0].blocks, blocks)
    assert sent.plan.new_rows[0].sampling == request.sampling
    sent.plan.new_rows = plan.new_rows
    assert sent.plan == plan
    masks = np.full((2, 3), -1, dtype=np.int32)
    masked = decode(encode(DrawMasked(masks[:, :2])))
    assert isinstance(masked, DrawMasked)
    assert np.array_equal(masked.masks, masks[:, :2])


class Reader(threading.Thread):
    """Reads messages from a ring until the writer is gone."""

    def __init__(self, memory: int, slow: bool) -> None:
        super().__init__()
        self.new, self.taken = create_counter(), create_counter()
        closed, self.closing = os.pipe()
        self._reader, self._slow = RingReader(memory, self.new, self.taken, closed), slow
        self.messages: list[bytes] = []

    def run(self) -> None:
        try:
            while True:
                self.messages.append(self._reader.receive())
                time.sleep(0.002 if self._slow else 0)
        except EOFError:
            return


def test_a_ring_brings_every_message_to_every_reader() -> None:
    memory = create_memory("test", 1000)
    readers = [Reader(memory, slow) for slow in (False, True)]
    for reader in readers:
        reader.start()
    writer = RingWriter(memory, [(reader.new, reader.taken) for reader in readers], lambda: None)
    sizes = [0, 1, 996, 997, 3, 5_000, *torch.randint(0, 400, (60,)).tolist()]
    messages = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    for message in messages:
        writer.send(message)
    for reader in readers:
        until = time.monotonic() + 10
        while len(reader.messages) < len(messages) and time.monotonic() < until:
            time.sleep(0.01)
        os.close(reader.closing)
        reader.join()
        assert reader.messages == messages


def test_a_full_ring_asks_whether_its_readers_live() -> None:
    class Gone(Exception):
        pass

    def check() -> None:
        raise Gone

    writer = RingWriter(create_memory("test", 100), [(create_counter(), create_counter())], check)
    writer.send(bytes(90))
    with pytest.raises(Gone):
        writer.send(bytes(90))
