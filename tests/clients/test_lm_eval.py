"""lm-eval against a Baton that serves the demo model: its results are those of transformers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton_demo import MODEL_DIR
from tests.e2e.stack import Stack

from .conftest import LOOP

pytestmark = pytest.mark.asyncio(loop_scope=LOOP)
CONTEXT = "Baton is"
OTHER_WORDS = " a purple elephant of no known kind"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


def client(demo: Stack, kind: str = "local-completions", **options: Any) -> Any:
    path = "chat/completions" if kind == "local-chat-completions" else "completions"
    return get_model(kind)(
        model=demo.model,
        base_url=f"{demo.url}/v1/{path}",
        tokenizer=str(MODEL_DIR),
        header={"Authorization": f"Bearer {demo.api_key}"},
        max_retries=1,
        **options,
    )


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]  # type: ignore[arg-type]


def scores(reference: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the log probability of a continuation, and whether it is the most likely one, by transformers."""
    with torch.inference_mode():
        logits = reference(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    rows = logits.float().log_softmax(-1)
    picked = rows[range(len(continuation)), continuation]
    return float(picked.sum()), bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)


def greedy(reference: Any, context: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([context])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in out[0, len(context) :]]


@pytest.mark.parametrize("options", [{}, {"num_concurrent": 4}, {"batch_size": 3}])
async def test_loglikelihood(demo: Stack, tokenizer: Any, reference: Any, options: dict[str, Any]) -> None:
    """One request after the other, several at a time, and several prompts in one."""
    encode = encoder(tokenizer)
    likely = tokenizer.decode(greedy(reference, encode(CONTEXT), 8))
    asked = [(CONTEXT, likely), (CONTEXT, OTHER_WORDS), ("", CONTEXT), (CONTEXT + likely, " and")]
    model = client(demo, **options)
    answers = await asyncio.to_thread(model.loglikelihood, instances("loglikelihood", asked))
    expected = []
    for context, continuation in asked:
        given = encode(context) if context else [tokenizer.bos_token_id]
        expected.append(scores(reference, given, encode(context + continuation)[len(encode(context)) :]))
    for (logprob, is_greedy), (right, is_right) in zip(answers, expected, strict=True):
        assert logprob == pytest.approx(right, abs=2e-3)
        assert is_greedy == is_right
    assert [is_greedy for _, is_greedy in answers[:2]] == [True, False]


async def test_loglikelihood_where_the_answer_ends(demo: Stack, tokenizer: Any, reference: Any) -> None:
    """lm-eval leaves out the last log probability, of a generated token: there must be one for an end token, too."""
    context = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is Baton?"}], add_generation_prompt=True, return_dict=False
    )
    answer = greedy(reference, context, 100)
    assert answer[-1] in reference.generation_config.eos_token_id
    request = ((None, None), context, answer[:-1])
    [(logprob, is_greedy)] = await asyncio.to_thread(client(demo)._loglikelihood_tokens, [request])
    assert logprob == pytest.approx(scores(reference, context, answer[:-1])[0], abs=2e-3)
    assert is_greedy


async def test_rolling_loglikelihood(demo: Stack, tokenizer: Any, reference: Any) -> None:
    text = (CONTEXT + OTHER_WORDS) * 3
    model = client(demo)
    [answer] = await asyncio.to_thread(model.loglikelihood_rolling, instances("loglikelihood_rolling", [(text,)]))
    assert answer == pytest.approx(scores(reference, [tokenizer.bos_token_id], encoder(tokenizer)(text))[0], abs=5e-3)


@pytest.mark.parametrize("options", [{}, {"num_concurrent": 3}, {"batch_size": 2}, {"tokenized_requests": False}])
async def test_generate_until(demo: Stack, tokenizer: Any, reference: Any, options: dict[str, Any]) -> None:
    prompts = [CONTEXT, "A prefill pod"]
    # A prompt sent as text gets the special tokens of the model's tokenizer.
    special = not options.get("tokenized_requests", True)
    ids = [tokenizer(prompt, add_special_tokens=special).input_ids for prompt in prompts]
    texts = [tokenizer.decode(greedy(reference, prompt, 24), skip_special_tokens=True) for prompt in ids]
    assert any(" the" in text for text in texts)
    asked = [(prompt, {"until": [" the"], "max_gen_toks": 24, "do_sample": False}) for prompt in prompts]
    answers = await asyncio.to_thread(client(demo, **options).generate_until, instances("generate_until", asked))
    assert answers == [text.split(" the")[0] for text in texts]


async def test_a_chat(demo: Stack) -> None:
    messages: Any = [{"role": "user", "content": "What is Baton?"}]
    expected = await demo.client().chat.completions.create(model=demo.model, messages=messages, temperature=0)
    model = client(demo, "local-chat-completions")
    prompt = model.apply_chat_template(messages)
    asked = instances("generate_until", [(prompt, {"until": ["\n\n"], "max_gen_toks": 200})])
    assert await asyncio.to_thread(model.generate_until, asked) == [expected.choices[0].message.content]


async def test_a_task(demo: Stack, tokenizer: Any, reference: Any, tmp_path: Any) -> None:
    """A task of multiple choice, from its file to its accuracy."""
    docs = [{"question": CONTEXT, "choices": [" an open-source", OTHER_WORDS], "answer": i % 2} for i in range(4)]
    config = {
        "task": "baton_choices",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(docs)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    results = await asyncio.to_thread(
        lambda: simple_evaluate(
            client(demo), tasks=[config], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
        )
    )
    assert results is not None
    assert results["results"]["baton_choices"]["acc,none"] == 0.5
    for sample in results["samples"]["baton_choices"]:
        for (logprob, _), choice in zip(sample["filtered_resps"], sample["doc"]["choices"], strict=True):
            context, whole = map(encoder(tokenizer), (CONTEXT, CONTEXT + choice))
            right, _ = scores(reference, context, whole[len(context) :])
            assert float(logprob) == pytest.approx(right, abs=2e-3)
