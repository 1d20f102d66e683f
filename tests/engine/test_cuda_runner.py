"""The GPU's runner gives the same tokens as the CPU's, with whole graphs, with pieces of graphs and with neither."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.cuda_runner import CudaRunner
from baton_engine.decode_graphs import DecodeGraphs
from baton_engine.prompt_graphs import PromptGraphs
from baton_engine.sampling import Grammar, GrammarKind
from baton_engine.sequence import FinishReason, Request
from baton_engine.step_in_flight import StepInFlight
from baton_engine.step_plan import StepPlan
from tests.conftest import MakeModel
from tests.models import END, make_tokenizer

from .fake_cuda import pretend
from .harness import assert_idle, generate, make_engine, make_prompt, make_request

EOS = make_tokenizer().convert_tokens_to_ids(END)
WORDS = Grammar(GrammarKind.REGEX, "([a-f]{1,3}[,;])+", "response_format")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.9, "top_k": 7, "seed": 1 << 63},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.7, "min_p": 0.1, "seed": 9},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 0},
    {"temperature": 0.0, "presence_penalty": 1.5, "min_tokens": 5, "eos_token_ids": [7, 9, 11]},
    {"temperature": 0.8, "logit_bias": {5: 3.0}, "bad_words": [[5, 5], [9]], "n": 3},
    {"temperature": 0.9, "top_p": 0.9, "n": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 1.0, "grammar": WORDS, "eos_token_ids": [EOS]},
    {"temperature": 0.9, "grammar": WORDS, "eos_token_ids": [EOS], "logit_bias": {EOS: 3.0}, "logprobs": 2, "n": 2},
    {"temperature": 0.8, "grammar": WORDS, "eos_token_ids": [EOS], "frequency_penalty": 0.5, "prompt_logprobs": 2},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "few sequences": {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    "many sequences": {"max_num_seqs": 16, "max_num_batched_tokens": 128, "block_size": 16},
    "eager": {"enforce_eager": True},
    "preempted": {"num_blocks": 40, "max_num_seqs": 16},
    "deterministic": {"deterministic": True},
}


def make_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request(
            id,
            make_prompt(rng.choice([1, 2, 5, 15, 16, 17, 30, 45, 100]), seed=seed),
            max_tokens=rng.randint(5, 25),
            **rng.choice(KINDS),
        )
        for id in range(40)
    ]


# Fields of a family's tiny model.
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma4": {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    "deepseek_v4": {"index_topk": 600},  # all entries are selected
    "falcon": {"alibi": True, "num_attention_heads": 6, "hidden_size": 96},
    # The layer without an indexer has another block table than the one that selects for it.
    "glm5_next": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", *["indexed_attention"] * 2],
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"conv_L_cache": 6},
    "mistral": {"hidden_act": "relu"},
    "mistral_large4": {"kv_source_layers": [0, 1, 0, 1], "index_topk": 100},
    "mixtral": {"hidden_act": "quick_gelu"},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"]},
    "zamba2": {"use_shared_attention_adapter": True, "use_mem_rope": True},
}


@pytest.mark.parametrize(
    "family",
    [
        "bloom",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_small",
        "gpt2",
        "gpt_neox",
        "falcon",
        "granite",
        "granitemoehybrid",
        "mistral",
        "olmo2",
        "mixtral",
        "qwen",
        "qwen2_moe",
        "olmoe",
        "gpt_oss",
        "glm4_moe",
        "deepseek_v3",
        "deepseek_v32",
        "axk2",
        "bailing_hybrid",
        "beam",
        "deepseek_v4",
        "diffllama",
        "doge",
        "dots3_note",
        "ernie4_5_vl",
        "falcon_h1",
        "falcon_mamba",
        "flint",
        "glm5_next",
        "hrm_text",
        "hy_v4",
        "jamba",
        "jetmoe",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "longcat_flash",
        "mimo_v2_flash",
        "mistral_large4",
        "mamba2",
        "minimax",
        "minimax_m3",
        "modernbert_decoder",
        "molmo2",
        "muse_glimmer",
        "muse_spark",
        "nemotron_h",
        "olmo_hybrid",
        "ouro",
        "qwen3_5",
        "qwen3_next",
        "recurrent_gemma",
        "step3p7",
        "zamba2",
    ],
)
def test_same_tokens_of_other_families(tiny_model: MakeModel, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(family, initializer_range=0.1, **OVERRIDES.get(family, {}))
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 4, "max_model_len": 160}
    expected = generate(make_engine(folder, **settings), make_requests(7)[:7])
    pretend(monkeypatch)
    assert generate(make_engine(folder, **settings), make_requests(7)[:7]).tokens == expected.tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_same_tokens_as_on_the_cpu(llama: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 4, "max_model_len": 160}
    settings |= SETTINGS[name]
    # Few seeds have requests that are all so short that 40 blocks suffice for them.
    seed = 7 if name == "preempted" else random.randrange(1000)
    print(f"seed {seed}")
    expected = generate(make_engine(llama, **{**settings, "deterministic": False}), make_requests(seed))
    assert len(expected.reasons) == sum(request.sampling.n for request in make_requests(seed))
    pretend(monkeypatch)
    engine = make_engine(llama, **settings)
    got = generate(engine, make_requests(seed))
    assert got.tokens == expected.tokens
    assert got.reasons == expected.reasons
    assert_idle(engine)
    assert bool(engine.scheduler.num_preemptions) == (name == "preempted")
    twins = {(delta.id, delta.choice, delta.offset): delta for delta in expected.deltas}
    for delta in got.deltas:
        twin = twins[delta.id, delta.choice, delta.offset]
        assert [entry.logprob for entry in delta.logprobs] == pytest.approx(
            [entry.logprob for entry in twin.logprobs], abs=1e-4
        )
        for ours, theirs in zip(delta.prompt_logprobs or [], twin.prompt_logprobs or [], strict=True):
            # Rounding may exchange two tokens of about the same rank.
            assert ours.token_id == theirs.token_id
            assert abs(ours.rank - theirs.rank) <= 2
            assert [ours.logprob, *ours.top_logprobs] == pytest.approx(
                [theirs.logprob, *theirs.top_logprobs], abs=1e-4
            )  # fmt: skip


def test_grammars_and_prompt_logprobs_leave_a_pod_on_its_graphs(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decode step is replayed, and each step is launched before the tokens of the one before are read."""
    pretend(monkeypatch)
    kinds: list[dict[str, Any]] = [
        {},
        {"grammar": WORDS, "eos_token_ids": [EOS], "temperature": 1.0},
        {"prompt_logprobs": 3},
        {"grammar": WORDS, "temperature": 1.0, "presence_penalty": 0.5},
    ]
    engine = make_engine(llama, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=256)
    events: list[str] = []

    def noted(owner: type, method: str, name: str) -> None:
        plain = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda self, *rest: (events.append(name), plain(self, *rest))[1])

    noted(DecodeGraphs, "replay", "graph")
    noted(CudaRunner, "_run", "eager")
    noted(StepInFlight, "wait", "read")
    noted(StepInFlight, "draw_masked", "draw")
    requests = [make_request(id, make_prompt(20, seed=id), 40, seed=id, **kind) for id, kind in enumerate(kinds)]
    transcript = generate(engine, requests)
    # Requests with a grammar are scheduled once it is compiled. The others may have decoded a few tokens by then.
    first = events.index("draw")
    steady = events[first + 1 :][: 4 * 20]
    assert "eager" not in steady
    assert steady[:60] == ["graph", "read", "draw"] * 20
    for id in (1, 3):
        assert transcript.reasons[id, 0] in (FinishReason.STOP, FinishReason.LENGTH)
    text = make_tokenizer().decode(transcript.tokens[3, 0])
    assert re.fullmatch("([a-f]{1,3}[,;])*[a-f]{0,3}", str(text))
    assert_idle(engine)


def test_the_end_frees_the_graphs(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    runner: Any = make_engine(llama, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64).runner
    runner.close()
    assert runner._recorder.released


def test_steps_with_prompts_run_as_whole_graphs(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks alone and after decodes take them; steps with too many or too long prompts take others."""
    pretend(monkeypatch)
    monkeypatch.setattr("baton_engine.prompt_graphs.GRAPH_CHUNKS", 2)
    monkeypatch.setattr("baton_engine.prompt_graphs.GRAPH_KEYS", 40)
    monkeypatch.setattr("baton_engine.prompt_graphs.SIZES", (4, 12, 24, 48))
    folder = tiny_model("gemma3", initializer_range=0.1)
    # Without a limit by time, the chunks do not depend on how fast this machine is.
    settings = {"max_num_batched_tokens": 24, "max_model_len": 160, "block_size": 4, "chunk_ms": 0.0}
    engine, other = make_engine(folder, **settings), make_engine(folder, **settings)
    sizes: list[tuple[int, ...]] = []
    replay = PromptGraphs.forward

    def noted(self: PromptGraphs, size: int, packed: torch.Tensor, plan: StepPlan, starts: list[int]) -> Any:
        sizes.append((size, *plan.counts))
        return replay(self, size, packed, plan, starts)

    monkeypatch.setattr(PromptGraphs, "forward", noted)
    cases: list[tuple[list[int], list[tuple[int, ...]]]] = [
        ([4], [(4, 4)]),
        ([3], [(4, 3)]),
        ([9, 12], [(24, 9, 12)]),
        ([5, 6, 7], []),
        ([60], [(24, 24)]),
        ([1], []),
        # The longer prompts go on beside decodes of the shorter ones.
        ([20, 14], [(24, 14, 10), (12, 1, 10)]),
        # Three chunks, of which one was cached in part, and then two beside decodes.
        ([18, 6, 19, 20], [(24, 1, 1, 15, 4)]),
        # The last prompt is one chunk too many at first, and too long in the end.
        ([8, 8, 70], [(24, 1, 1, 22)]),
    ]
    for case, (lengths, expected) in enumerate(cases):
        sizes.clear()
        requests = [make_request(10 * case + i, make_prompt(n, seed=n), 5) for i, n in enumerate(lengths)]
        tokens = generate(engine, requests).tokens
        assert sizes == expected, lengths
        with monkeypatch.context() as patch:
            patch.setattr(PromptGraphs, "size_for", lambda *_: None)
            assert generate(other, requests).tokens == tokens


def test_a_grammar_beside_others_may_be_aborted_before_its_mask(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    rule = {"grammar": WORDS, "eos_token_ids": [], "temperature": 1.0}
    engine = make_engine(llama, enable_prefix_caching=False)
    expected = generate(engine, [make_request(0, make_prompt(20), 12)]).tokens
    for aborted_at in range(1, 8):
        engine.add(make_request(0, make_prompt(20), 12))
        engine.add(make_request(1, make_prompt(9), 12, **rule))
        tokens: list[int] = []
        steps = 0

        def on_wait() -> None:
            if steps == aborted_at:  # noqa: B023
                engine.abort(1)

        while engine.has_work:
            steps += 1
            looks = iter([True, False])
            monkeypatch.setattr(engine._in_flight, "done", lambda: not next(looks, False))  # noqa: B023
            tokens += [token for delta in engine.step(on_wait).deltas if delta.id == 0 for token in delta.tokens]
        monkeypatch.undo()
        pretend(monkeypatch)
        assert tokens == expected[0, 0]
        assert_idle(engine)
