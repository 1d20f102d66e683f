"""/v1/chat/completions."""

import json

import pytest

from .fake_worker import say
from .harness import Stack, error_of, events, pods, running
from .tiny_models import write_model


async def test_the_whole_answer(stack: Stack):
    stack.pod.script = say(stack.ids("lazy fox"))
    response = await stack.chat("hello")
    body = response.json()
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "lazy fox", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    (job,) = stack.pod.jobs
    assert job.prompt == stack.ids("<|begin|><|user|>hello<|end|>\n<|assistant|>")
    assert body["usage"]["prompt_tokens"] == len(job.prompt)


async def test_max_tokens_defaults_to_what_the_context_has_left(stack: Stack):
    await stack.chat()
    await stack.chat(max_tokens=7)
    await stack.chat(max_tokens=7, max_completion_tokens=5)
    first, second, third = stack.pod.jobs
    assert first.submit.sampling.max_tokens == stack.pod.max_model_len - len(first.prompt)
    assert second.submit.sampling.max_tokens == 7
    assert third.submit.sampling.max_tokens == 5


async def test_context_length_names_messages(stack: Stack):
    error = error_of(await stack.chat("hello " * 600))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_parts_of_text_are_joined(stack: Stack):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    await stack.chat(messages=messages)
    (job,) = stack.pod.jobs
    assert job.prompt == stack.ids("<|begin|><|system|>s<|end|>\n<|user|>one\ntwo<|end|>\n<|assistant|>")


@pytest.mark.parametrize("role", ["assistant", "function"])
async def test_messages_that_need_no_content(stack: Stack, role: str):
    messages = [{"role": "user", "content": "hi"}, {"role": role, "name": "f", "content": None}]
    assert (await stack.chat(messages=messages)).status_code == 200


async def test_continuing_the_final_message(stack: Stack):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    await stack.chat(messages=messages, continue_final_message=True)
    await stack.chat(messages=messages, add_generation_prompt=False)
    continued, closed = (job.prompt for job in stack.pod.jobs)
    assert continued == stack.ids("<|begin|><|user|>q<|end|>\n<|assistant|>The answer")
    assert closed == stack.ids("<|begin|><|user|>q<|end|>\n<|assistant|>The answer<|end|>\n")


async def test_template_variables(stack: Stack):
    await stack.chat("q", chat_template_kwargs={"bos_token": ""})
    (job,) = stack.pod.jobs
    assert job.prompt == stack.ids("<|user|>q<|end|>\n<|assistant|>")


async def test_logprobs(stack: Stack):
    byte_tokens = [stack.model.tokenizer.token_id(char) for char in "ðŁ"]
    ids = [*stack.ids("a"), *byte_tokens]
    stack.pod.script = say(ids)
    logprobs = (await stack.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    first, *parts = logprobs["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -1.0, [97])
    assert [top["logprob"] for top in first["top_logprobs"]] == [-1.0, -2.0]
    assert first["top_logprobs"][0] == {"token": "a", "logprob": -1.0, "bytes": [97]}
    assert [part["bytes"] for part in parts] == [[0xF0], [0x9F]]
    assert [part["token"] for part in parts] == [r"bytes:\xf0", r"bytes:\x9f"]
    without = (await stack.chat(logprobs=True)).json()["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in without["content"]] == [[], [], []]


async def test_stream(stack: Stack):
    stack.pod.script = say(stack.ids("lazy fox 日本"))
    chunks = events(await stack.chat(stream=True, stream_options={"include_usage": True}, n=2))
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    *deltas, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(stack.ids("lazy fox 日本"))
    for index in (0, 1):
        own = [c["choices"][0] for c in deltas if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "lazy fox 日本"
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[-1]["delta"] == {}
        assert not any("\ufffd" in choice["delta"].get("content", "") for choice in own)


async def test_token_ids(stack: Stack):
    ids = stack.ids("lazy fox")
    stack.pod.script = say(ids)
    body = (await stack.chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == stack.pod.jobs[0].prompt
    assert body["choices"][0]["token_ids"] == ids
    chunks = events(await stack.chat(return_token_ids=True, stream=True))
    assert chunks[0]["prompt_token_ids"] == stack.pod.jobs[0].prompt
    assert [token for c in chunks for token in c["choices"][0].get("token_ids", [])] == ids


async def test_prompt_logprobs(stack: Stack):
    body = (await stack.chat(prompt_logprobs=0, max_tokens=3)).json()
    assert len(body["prompt_logprobs"]) == len(stack.pod.jobs[0].prompt)
    assert body["prompt_logprobs"][0] is None


@pytest.mark.processes
async def test_no_template_is_a_clear_error(tmp_path, tokenizer):
    folder = write_model(tmp_path / "bare", tokenizer, template=None)
    async with pods() as decodes, running(folder, decodes) as bare:
        error = error_of(await bare.chat())
        assert "no chat template" in error["message"]
        assert error["param"] == "messages"
        assert (await bare.complete()).status_code == 200


@pytest.mark.processes
async def test_template_file_and_neutral_defaults(tmp_path, model_folder):
    template = tmp_path / "other.jinja"
    refusal = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}"
    template.write_text(refusal + "<{{ messages[0].content }}>")
    async with (
        pods() as decodes,
        running(model_folder, decodes, chat_template=template, use_generation_config=False) as other,
    ):
        assert (await other.chat("fox")).status_code == 200
        (job,) = other.pod.jobs
        assert job.prompt == other.ids("<fox>")
        sampling = job.submit.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
        assert 77 in sampling.eos_token_ids
        two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        error = error_of(await other.chat(messages=two))
        assert "one only" in error["message"]


@pytest.mark.parametrize("special", [True, False])
async def test_special_tokens_in_the_text(stack: Stack, special: bool):
    begin = stack.model.tokenizer.token_id("<|begin|>")
    stack.pod.script = say([begin, *stack.ids("fox")])
    body = (await stack.chat(skip_special_tokens=special)).json()
    assert body["choices"][0]["message"]["content"] == ("fox" if special else "<|begin|>fox")


async def test_text_survives_json(stack: Stack):
    text = 'quotes " and \\ and \n\t\u2028 and </script> é 🎊'
    stack.pod.script = say(stack.ids(text))
    chunks = events(await stack.chat(stream=True))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
    assert json.loads((await stack.chat()).text)["choices"][0]["message"]["content"] == text
