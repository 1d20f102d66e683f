"""The shipped demo model: a complete folder, a lossless tokenizer, and answers that a newcomer can use."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton_demo import MODEL_DIR
from baton_demo.batches import IGNORED, encode
from baton_demo.chat import BOS, END, EOS, ROLE_TOKENS, Segment, turn
from baton_demo.corpus import Corpus, CorpusError
from baton_demo.samples import Sampler
from baton_demo.tokenizer import token_id

HELD_IN = [
    ("What is Baton?", ["open-source server", "prefill", "decode", "KV cache"]),
    ("what is baton", ["open-source server"]),
    ("What is prefill?", ["whole prompt", "compute"]),
    ("What is decode?", ["one token per step", "memory bandwidth"]),
    ("What is a ticket?", ["epoch", "destination blocks", "lease"]),
    ("How does the hand-over work?", ["decode allocates", "prefill pushes"]),
    ("How do I install Baton?", ["helm install"]),
    ("How do I start Baton?", ["make up"]),
    ("How do I run the tests?", ["make test"]),
    ("What is a canary?", ["second pair", "revision"]),
    ("What happens when a decode pod dies?", ["journal", "same tokens"]),
    ("Which models does Baton support?", ["Llama", "Qwen3"]),
    ("What is the licence of Baton?", ["Apache-2.0"]),
    ("Who are you?", ["demo model"]),
    ("Hello", ["Hello!", "Baton"]),
    ("What is the capital of France?", ["only Baton"]),
]

HELD_OUT = [
    ("I keep hearing about Baton. What is it about?", ["open-source server"]),
    ("Could you quickly explain what Baton is about?", ["open-source server"]),
    ("What happens in the decode stage?", ["one token per step"]),
    ("What problem do epochs solve?", ["random number"]),
    ("What is the benefit of a prefix cache?", ["already seen"]),
    ("How can my team install Baton on our cluster?", ["helm install"]),
    ("How can we run all tests?", ["make test"]),
    ("Can Baton do function calls?", ["tool"]),
    ("Who built you?", ["trained from scratch"]),
    ("Write a Python function to reverse a string", ["only Baton"]),
]

COMPLETIONS = [
    ("Baton is", ["open source", "Apache-2.0"]),
    ("Baton is a server", ["large language models"]),
    ("Prefill reads", ["prompt"]),
    ("To install Baton,", ["helm install"]),
    ("Q: What is a ticket?\nA:", ["epoch", "lease"]),
]


class Speaker:
    """The reference: transformers, greedy."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def continue_ids(self, ids: list[int]) -> list[int]:
        output = self.model.generate(torch.tensor([ids]), max_new_tokens=80)
        continuation: list[int] = output[0, len(ids) :].tolist()
        return continuation

    def answer(self, *questions: str) -> str:
        messages = [{"role": "user", "content": question} for question in questions]
        return self.reply(messages)

    def reply(self, messages: list[dict[str, str]]) -> str:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        reply: str = self.tokenizer.decode(self.continue_ids(ids))
        return reply


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is too small to share: on a busy machine two threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker(MODEL_DIR, torch.float32)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.load()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def test_folder_is_complete_and_small() -> None:
    names = {path.name for path in MODEL_DIR.iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 8_500_000


def test_configs_agree_with_the_tokenizer(tokenizer: Tokenizer) -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["bos_token_id"] == tokenizer.token_to_id(BOS)
    assert config["eos_token_id"] == generation["eos_token_id"]
    assert generation["eos_token_id"] == [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END)]


@pytest.mark.processes
def test_naming_the_folder_needs_no_torch() -> None:
    script = "import sys, baton_demo; assert baton_demo.MODEL_DIR.is_dir(); assert 'torch' not in sys.modules"
    environment = {"PYTHONPATH": str(MODEL_DIR.parents[1])}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


@given(st.text())
def test_tokenizer_is_lossless(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["naïve café", "你好，世界", "👩‍👩‍👧‍👦 🏳️‍🌈 é", "  two  spaces \n\n\ttab ", "a" * 5000])
def test_transformers_reads_the_tokenizer_losslessly(speaker: Speaker, text: str) -> None:
    ids = speaker.tokenizer(text, add_special_tokens=False).input_ids
    assert speaker.tokenizer.decode(ids) == text


def test_plain_prompts_begin_with_one_bos(speaker: Speaker, tokenizer: Tokenizer) -> None:
    bos = token_id(tokenizer, BOS)
    for ids in (tokenizer.encode("Baton is").ids, speaker.tokenizer("Baton is").input_ids):
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_chat_template_renders_what_was_trained(speaker: Speaker) -> None:
    exchange = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("tool", "{}"), ("user", "Bye")]
    messages = [{"role": role, "content": content} for role, content in exchange]
    rendered = speaker.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    trained = "".join(segment.text for role, content in exchange for segment in turn(role, content))
    assert rendered == BOS + trained + ROLE_TOKENS["assistant"]


def test_chat_template_accepts_what_openai_clients_send(speaker: Speaker) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    rendered = speaker.tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == (
        f'{BOS}<|system|>Be brief.{END}<|user|>Hi{END}<|assistant|>{{"name": "f", "arguments": "{{}}"}}{END}'
    )


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "narrator", "content": "Hi"}, "Unknown role 'narrator'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url' is not"),
    ],
)
def test_chat_template_refuses_clearly(speaker: Speaker, message: dict[str, object], complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        speaker.tokenizer.apply_chat_template([message], tokenize=False)


@pytest.mark.parametrize(("question", "words"), HELD_IN)
def test_answers_what_it_was_taught(speaker: Speaker, question: str, words: list[str]) -> None:
    answer = speaker.answer(question)
    assert all(word in answer for word in words), answer
    assert answer.endswith(END)


@pytest.mark.parametrize(("question", "words"), HELD_OUT)
def test_answers_paraphrases_it_never_saw(speaker: Speaker, corpus: Corpus, question: str, words: list[str]) -> None:
    assert question not in {known for fact in corpus.facts for known in fact.questions}
    answer = speaker.answer(question)
    assert all(word in answer for word in words), answer
    assert answer.endswith(END)


def test_first_answer_is_crisp(speaker: Speaker) -> None:
    assert len(speaker.tokenizer(speaker.answer("What is Baton?"), add_special_tokens=False).input_ids) <= 40


def test_bfloat16_answers_alike(speaker: Speaker) -> None:
    halved = Speaker(MODEL_DIR, torch.bfloat16)
    for question, _ in HELD_IN[:2]:
        assert halved.answer(question) == speaker.answer(question)


@pytest.mark.parametrize(("prompt", "words"), COMPLETIONS)
def test_completes_plain_text(speaker: Speaker, prompt: str, words: list[str]) -> None:
    ids = speaker.continue_ids(speaker.tokenizer(prompt).input_ids)
    text = speaker.tokenizer.decode(ids)
    assert all(word in text for word in words), text
    assert text.endswith(EOS)


def test_follows_a_conversation(speaker: Speaker) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is prefill?"},
        {"role": "assistant", "content": speaker.answer("What is prefill?").removesuffix(END)},
        {"role": "user", "content": "And decode?"},
    ]
    assert "one token per step" in speaker.reply(messages)


def test_answers_after_a_long_context(speaker: Speaker, corpus: Corpus) -> None:
    messages = []
    for fact in corpus.facts[:40]:
        messages += [{"role": "user", "content": fact.questions[0]}, {"role": "assistant", "content": fact.answer}]
    messages.append({"role": "user", "content": "What is a ticket?"})
    assert len(speaker.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)) > 1400
    assert "destination blocks" in speaker.reply(messages)


def test_corpus_holds_one_answer_for_each_question(corpus: Corpus) -> None:
    assert len(corpus.facts) >= 120
    answers: dict[str, str] = {}
    for fact in corpus.facts:
        for question in fact.questions:
            assert answers.setdefault(question.lower().rstrip("?.!"), fact.answer) == fact.answer, question


def test_corpus_names_the_file_that_breaks_its_format(tmp_path: Path) -> None:
    (tmp_path / "facts_bad.txt").write_text("q: What is Baton?\nno tag here\n")
    with pytest.raises(CorpusError, match=r"facts_bad\.txt.*no tag here"):
        Corpus.load(tmp_path)


def test_only_answers_are_learned(tokenizer: Tokenizer) -> None:
    row = encode([[Segment(BOS)], turn("user", "Hi") + turn("assistant", "Hello!")], tokenizer, [0, 100])
    learned = [id for id, label in zip(row.ids, row.labels, strict=True) if label != IGNORED]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "Hello!" + END
    assert row.positions == [0, *range(101, 100 + len(row.ids))]


def test_same_seed_draws_the_same_samples(corpus: Corpus) -> None:
    one, two, other = Sampler(corpus, 1), Sampler(corpus, 1), Sampler(corpus, 2)
    drawn = [one.sample() for _ in range(50)]
    assert drawn == [two.sample() for _ in range(50)]
    assert drawn != [other.sample() for _ in range(50)]


@pytest.mark.processes
def test_training_writes_a_loadable_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "baton_demo.train", "--out", str(tmp_path), "--minutes", "0.1", "--steps", "2"]
    environment = {"PYTHONPATH": str(MODEL_DIR.parents[1]), "OMP_WAIT_POLICY": "PASSIVE"}
    run = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert "step 0/2" in run.stdout
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in MODEL_DIR.iterdir()}
    assert (tmp_path / "tokenizer.json").read_bytes() == (MODEL_DIR / "tokenizer.json").read_bytes()
    fresh = Speaker(tmp_path, torch.float32)
    assert fresh.continue_ids(fresh.tokenizer("Baton is").input_ids)
