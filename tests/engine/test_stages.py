"""Processes that compute a model's layers one after another give the tokens of one process, and of transformers."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.config import ConfigError
from baton_engine.executor import Launched
from baton_engine.kv_cache import KvCache
from baton_engine.ops import TORCH
from baton_engine.stage import Stage
from baton_engine.step_plan import StepPlan
from tests.conftest import MakeModel
from tests.models import is_greedy

from .handover import Pair
from .harness import Transcript, assert_idle, generate, make_prompt, make_request, make_various_requests
from .pools import MakeEngine
from .test_equality import SHAPES
from .test_ranks import FAMILIES

ALL_RANKS = bool(os.environ.get("ALL_RANKS"))  # each family, instead of one of each forward pass
# Each way in which layers pass hidden states on, and what comes before the first layer or depends on a layer's number.
REPRESENTATIVE = (
    "bloom-tied", "gemma3-tied", "granite-biases", "gpt2", "gpt-oss", "qwen", "deepseek-v2-lite", "opt-350m", "xglm",
    "llama4", "nanochat", "mllama", "deepseek-v32", "mimo-v2-flash", "nemotron-super", "beam",
    "mistral-large-4-shared", "ouro", "modernbert-decoder", "lfm2-moe", "qwen3-next", "nemotron-h",
    "hy4-shared-selections", "recurrent-gemma", "falcon-h1-norms-after-gates", "dots3-note",
    "deepseek-v4-shared-entries", "glm5-next",
)  # fmt: skip

# The beginnings of the names of families that refuse stages.
UNDIVIDED = ("deepseek-v4", "gemma3n", "gemma4-small", "hrm-text", "zamba2")

LAYERS = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if not name.startswith(UNDIVIDED)] if ALL_RANKS else REPRESENTATIVE
)
def test_every_family_gives_the_tokens_of_transformers(tiny_model: MakeModel, divided: MakeEngine, name: str) -> None:
    family, overrides = SHAPES[name]
    folder = tiny_model(family, **overrides)
    prompts = [make_prompt(length, seed=3) for length in (17, 50)]
    for ranks in (1, 2) if ALL_RANKS or name == "gpt-oss" else (1,):
        engine = divided(folder, ranks, pipeline_parallel=2, max_num_batched_tokens=40)
        transcript = generate(engine, [make_request(id, prompt, 8) for id, prompt in enumerate(prompts)])
        for id, prompt in enumerate(prompts):
            assert len(transcript.tokens[id, 0]) == 8
            assert is_greedy(folder, prompt, transcript.tokens[id, 0])
        assert_idle(engine)


def test_no_stage_ends_between_the_attentions_of_a_layer(tiny_model: MakeModel, divided: MakeEngine) -> None:
    folder = tiny_model("longcat_flash", num_layers=3)
    with pytest.raises(ConfigError, match="must divide the 3 layers"):
        divided(folder, 1, pipeline_parallel=2)
    engine, prompt = divided(folder, 1, pipeline_parallel=3), make_prompt(20, seed=3)
    assert is_greedy(folder, prompt, generate(engine, [make_request(0, prompt, 8)]).tokens[0, 0])


def test_no_stage_ends_between_layers_that_share_latents(tiny_model: MakeModel, divided: MakeEngine) -> None:
    folder = tiny_model("mistral_large4", kv_source_layers=[0, 1, 0, 1])
    with pytest.raises(ConfigError, match=r"between layers 0 and 2, which share latents"):
        divided(folder, 1, pipeline_parallel=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({}, "--pipeline-parallel 2 is more than the model's 1 parts into which its layers can be divided"),
        (
            {"layer_types": ["compressed_sparse_attention"] * 3, "num_hash_layers": 3},
            "puts layer 2 of this model on a stage after the first one, but it chooses experts by token ids",
        ),
    ],
)
def test_where_no_stage_ends_in_compressed_attention(
    tiny_model: MakeModel, divided: MakeEngine, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        divided(tiny_model("deepseek_v4", **overrides), 1, pipeline_parallel=2)


@pytest.mark.parametrize("family", ["gemma3n", "hrm_text", "zamba2"])
def test_layers_that_need_more_than_the_hidden_states_before_them(
    tiny_model: MakeModel, divided: MakeEngine, family: str
) -> None:
    with pytest.raises(ConfigError, match="use --tensor-parallel"):
        divided(tiny_model(family), 1, pipeline_parallel=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_choices_caches_preemption_and_parameters(tiny_model: MakeModel, divided: MakeEngine, ranks: int) -> None:
    folder = tiny_model("qwen3", num_hidden_layers=3, use_sliding_window=True, sliding_window=13, layer_types=LAYERS)
    requests = make_various_requests(make_prompt(40, seed=1))
    settings = {"block_size": 4, "num_blocks": 72, "max_num_batched_tokens": 24, "max_model_len": 100}
    one = generate(divided(folder, 1, **settings), requests)
    engine = divided(folder, ranks, pipeline_parallel=2, **settings)
    several = generate(engine, requests)
    assert several.tokens == one.tokens
    assert several.reasons == one.reasons
    assert engine.load().preemptions
    [probabilities], [expected] = (
        [delta.prompt_logprobs for delta in transcript.deltas if delta.prompt_logprobs] for transcript in (several, one)
    )
    assert [each.token_id for each in probabilities] == [each.token_id for each in expected]
    assert [each.logprob for each in probabilities] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert_idle(engine)


def test_each_stage_works_on_other_sequences(llama: Path, divided: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that ends while a step is in flight goes to another sequence, which must not get its token."""
    engine = divided(llama, 1, pipeline_parallel=2, max_num_seqs=4)
    launch, in_flight = engine.runner.launch, set()

    def observed(plan: StepPlan) -> Launched:
        launched = launch(plan)
        in_flight.add(len(engine.runner._in_flight))
        others = {row for step, _ in engine._in_flight.independent() for row in step.plan.rows}
        begun = {new.row for new in plan.new_rows}
        assert others.isdisjoint(set(plan.rows) - begun)
        return launched

    monkeypatch.setattr(engine.runner, "launch", observed)
    prompts = [make_prompt(length, seed=6) for length in range(3, 15)]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt, 6 + number % 5))
    transcript = Transcript()
    while engine.has_work:
        transcript.take(engine.step().deltas)
        under_way = [sequence.request.id for step, _ in engine._in_flight.independent() for sequence in step.sequences]
        if 3 in under_way and len(transcript.tokens.get((3, 0), [])) > 2:
            engine.abort(3)
    assert in_flight == {1, 2}
    for number, prompt in enumerate(prompts):
        assert number == 3 or is_greedy(llama, prompt, transcript.tokens[number, 0])
    assert_idle(engine)


@pytest.mark.parametrize("model", ["windowed", "latent"])
@pytest.mark.parametrize(("prefill", "decode"), [((1, 2), (1, 1)), ((1, 2), (2, 1)), ((2, 1), (1, 2))])
def test_kv_goes_between_engines_divided_in_any_way(
    divided: MakeEngine,
    request: pytest.FixtureRequest,
    model: str,
    prefill: tuple[int, int],
    decode: tuple[int, int],
) -> None:
    folder = request.getfixturevalue(model)
    pair = Pair(
        divided(
            folder, prefill[0], pipeline_parallel=prefill[1], max_num_batched_tokens=24, num_blocks=512, block_size=8
        ),
        divided(folder, decode[0], pipeline_parallel=decode[1], num_blocks=256),
        seed=prefill[0] + decode[1],
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


def test_scales_of_kv_in_8_bits_are_those_of_one_process(tiny_model: MakeModel, divided: MakeEngine) -> None:
    folder, prompt = tiny_model("llama", num_hidden_layers=3), make_prompt(50)
    one, several = (divided(folder, 1, pipeline_parallel=stages, kv_cache_dtype="fp8") for stages in (1, 2))
    assert several.runner.cache.facts == one.runner.cache.facts
    expected = generate(one, [make_request(0, prompt, 12)]).tokens
    assert generate(several, [make_request(0, prompt, 12)]).tokens == expected


def test_a_number_that_is_not_finite_stays_in_its_request(llama: Path, divided: MakeEngine) -> None:
    engine = divided(llama, 1, pipeline_parallel=2)
    engine.runner._runner._model.embedding.weight[5] = float("nan")
    prompts = [7, 5, 9], [7, 8, 9]
    for id, prompt in enumerate(prompts):
        engine.add(make_request(id, prompt, 8))
    transcript, broken = Transcript(), []
    while engine.has_work:
        result = engine.step()
        broken += result.broken
        transcript.take(result.deltas)
    assert broken == [0]
    assert is_greedy(llama, prompts[1], transcript.tokens[1, 0])


def test_more_stages_than_layers_are_refused(llama: Path, divided: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="--pipeline-parallel 9 is more than the model's 2 layers"):
        divided(llama, 1, pipeline_parallel=9)


@pytest.mark.parametrize(("layers", "stages", "expected"), [(7, 3, [3, 2, 2]), (4, 2, [2, 2]), (3, 3, [1, 1, 1])])
def test_layers_are_divided_evenly(layers: int, stages: int, expected: list[int]) -> None:
    parts = [Stage(number, stages).layers(layers) for number in range(stages)]
    assert [len(part) for part in parts] == expected
    assert [layer for part in parts for layer in part] == list(range(layers))


def test_a_cache_holds_the_layers_of_its_stage() -> None:
    layout = KvLayout(7, (Plane("key", 1, 4, "float32"),), (None, 8, 8, None, 8, 8, 8))
    whole, *parts = (
        KvCache(layout, 4, torch.device("cpu"), TORCH, layers=layers)
        for layers in (None, *(Stage(number, 2).layers(7) for number in range(2)))
    )
    for cache in (whole, *parts):
        cache.allocate(6)
    # Groups of two layers: 0 and 3, 1 and 2, 4 and 5, 6.
    assert [cache.depth for cache in (whole, *parts)] == [2, 2, 2]
    tables, values = [[1], [2], [3], [4]], torch.arange(7 * 4 * 16, dtype=torch.uint8)
    whole.scatter(tables, layout.extent(0, 4), values)
    for part in parts:
        extent = layout.extent(0, 4, part.layers.start, len(part.layers))
        own = values.view(7, -1)[part.layers.start : part.layers.stop].flatten()
        part.scatter(tables, extent, own)
        gathered = torch.empty_like(own)
        part.gather(tables, extent, gathered)
        assert torch.equal(gathered, own)
        for layer in part.layers:
            group = whole.group_of(layer)
            assert part.group_of(layer) == group
            own, expected = (cache.layer(layer)[0][tables[group]].view(torch.int32) for cache in (part, whole))
            assert torch.equal(own, expected)
