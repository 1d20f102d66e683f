"""Models' folders for tests of chats: tokenizers of all kinds, and templates in the manner of well-known families."""

import functools
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from baton_gateway.models.model import ServedModel, load_model
from baton_gateway.models.models_file import ModelSpec, PoolSpec, SpecialTokensPolicy

from .tiny_models import CHAT_TEMPLATE, byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer, write_model

CONTROL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|im_start|>", "<|im_end|>", "</s>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "\n\n\n"]  # added, not special

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
THINKING = """{%- macro text(content) %}{{- content }}{%- endmacro %}
{%- if tools %}{{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson ~ '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = text(message.content or '') %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{%- set ns = namespace(out=bos_token) %}
{%- for message in messages %}
    {%- set ns.out = ns.out + ['<|', message['role'], '|>'] | join + '\\n\\n' + message['content'] | trim + eos_token %}
{%- endfor %}
{{- ns.out }}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.first and system is defined else '') }}
        {{- message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim ~ eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""
SILENT = """{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{{- '<|system|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'user' %}{{- '<|user|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' %}{{- '<|assistant|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "chatml": CHATML,
    "thinking": THINKING,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "silent": SILENT,
}


def _with_tokens(tokenizer: Tokenizer, **flags: bool) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False, **flags) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=n % 2 == 1) for n, token in enumerate(PLAIN)])
    return tokenizer


def _llama3() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.model.ignore_merges = True
    split = pre_tokenizers.Split(
        Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


def _mistral() -> Tokenizer:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def _folding() -> Tokenizer:
    """Lower-cases all text before it looks for tokens, also the special ones."""
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=True) for token in CONTROL])
    return tokenizer


def _word_level() -> Tokenizer:
    """Its vocabulary holds special tokens as words."""
    words = ["[UNK]", *CONTROL, "hello", "world", "user", "<", ">", "|", "x", "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


_MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: _with_tokens(byte_level_tokenizer()),
    "llama 3": lambda: _with_tokens(_llama3()),
    "llama 2": lambda: _with_tokens(byte_fallback_tokenizer()),
    "mistral": lambda: _with_tokens(_mistral()),
    "unigram": lambda: _with_tokens(metaspace_tokenizer()),
    "stripping": lambda: _with_tokens(byte_level_tokenizer(), lstrip=True, rstrip=True),
    "single words": lambda: _with_tokens(byte_level_tokenizer(), single_word=True),
    "folding": lambda: _with_tokens(_folding()),
    "word level": lambda: _with_tokens(_word_level()),
}
TOKENIZERS = tuple(_MAKERS)


@functools.cache
def _saved(kind: str) -> str:
    # Training does not give the same tokens each time.
    return str(_MAKERS[kind]().to_str())


def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer.from_str(_saved(kind))


def served(
    folder: Path, template: str, tokenizer: Tokenizer | None = None, policy: SpecialTokensPolicy = "text"
) -> ServedModel:
    write_model(folder, tokenizer or tokenizer_of("byte level"), template=template)
    pools = (PoolSpec(decode=("127.0.0.1:1",)),)
    return load_model(ModelSpec(name="m", folder=folder, pools=pools, special_tokens_in_content=policy))
