"""What models of each format write after the prompt: their thoughts, their answers and their calls."""

from dataclasses import dataclass, field
from typing import Any

from baton_gateway.reasoning.formats import ReasoningFormat
from baton_gateway.reasoning.thought_reader import Place
from baton_gateway.tools.tool_formats import ToolFormat

FUNCTIONS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"anyOf": [{"type": "string", "enum": ["w", "a"]}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["path", "text"],
    },
    "get_time": None,
}
WEATHER = '{"city": "Köln", "days": 2}'
CODE = 'def f(x):\n    return {"a": x < 1}\n'


@dataclass(frozen=True)
class Output:
    """calls: (name, arguments as an object) of each."""

    text: str
    reasoning: ReasoningFormat = "none"
    tools: ToolFormat = "none"
    place: Place = "before"
    thoughts: str = ""
    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


KOELN = ("get_weather", {"city": "Köln", "days": 2})
ROME = ("get_weather", {"city": "Rome"})
TIME: tuple[str, dict[str, Any]] = ("get_time", {})
FILE = ("write_file", {"path": "a.py", "text": CODE.rstrip("\n"), "mode": None, "tags": ["x", "</parameter"]})

_HARMONY_ANALYSIS = "<|channel|>analysis<|message|>The user wants the weather.\nI call it.<|end|>"
_DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
_DSML_CALLS = (
    '<｜DSML｜invoke name="write_file">\n<｜DSML｜parameter name="path" string="true">a.py</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="text" string="true">{CODE.rstrip()}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="mode" string="false">null</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="tags" string="false">["x", "</parameter"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
_STEP3_CALL = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">{}</steptml:invoke><｜tool_call_end｜>'
)
_STEP3_KEY = '<steptml:parameter name="{}">{}</steptml:parameter>'
_LIST = f'[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "get_time", "arguments": {{}}}}]'
_KIMI_CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"

OUTPUTS = {
    "qwen3": Output(
        "<think>\nOkay, Köln.\n\nI look.\n</think>\n\nIt is sunny.\n",
        "think", "hermes", thoughts="Okay, Köln.\n\nI look.", content="It is sunny.\n",
    ),
    "qwen3 without thoughts": Output("It is < 3 °C.", "think", "hermes", content="It is < 3 °C."),
    "qwen3 that mentions the marker": Output("Use <think> and </think>.", "think", content="Use <think> and </think>."),
    "qwen3 with a call": Output(
        f'<think>\nWeather?\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "think", "hermes", thoughts="Weather?", calls=[KOELN, TIME],
    ),
    "qwen3-thinking, begun by the prompt": Output(
        "Hmm.\n</think>\n\nYes.", "think", "hermes", "inside", thoughts="Hmm.", content="Yes."
    ),
    "deepseek-r1": Output("\nSo 1 + 1 is 2.\n</think>\n\n2", "think", "none", "inside", "So 1 + 1 is 2.", "2"),
    "thoughts that are cut off": Output("<think>\nSo </thin", "think", thoughts="So </thin"),
    "glm-4.5": Output(
        "\n<think>I call it.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "think", "glm", thoughts="I call it.", calls=[KOELN],
    ),
    "glm-4.7": Output(
        "I call it.</think>Well.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
        "<tool_call>get_time</tool_call>",
        "think", "glm", "inside", "I call it.", "Well.", [ROME, TIME],
    ),
    "gpt-oss": Output(
        f"{_HARMONY_ANALYSIS}<|start|>assistant<|channel|>final<|message|>It is sunny.",
        "harmony", "harmony", thoughts="The user wants the weather.\nI call it.", content="It is sunny.",
    ),
    "gpt-oss with a call": Output(
        f"{_HARMONY_ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        f"<|message|>{WEATHER}<|call|>",
        "harmony", "harmony", thoughts="The user wants the weather.\nI call it.", calls=[KOELN],
    ),
    "gpt-oss with a preamble": Output(
        f"{_HARMONY_ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER}",
        "harmony", "harmony", thoughts="The user wants the weather.\nI call it.", content="I look.", calls=[KOELN],
    ),
    "gpt-oss at low effort": Output(
        " to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>", "harmony", "harmony", calls=[TIME]
    ),
    "magistral": Output(
        "[THINK]Let me see.[/THINK]It is sunny.", "mistral", "mistral", thoughts="Let me see.", content="It is sunny."
    ),
    "magistral with calls": Output(
        f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]get_time[ARGS]{{}}",
        "mistral", "mistral", thoughts="Hm.", content="I look.", calls=[KOELN, TIME],
    ),
    "mistral 7B": Output(
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "get_time", "arguments": {{}}}}]',
        tools="mistral", calls=[KOELN, TIME],
    ),
    "gemma 4": Output(
        "<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:get_weather{city:<|\"|>Köln<|\"|>,days:2}"
        "<tool_call|><|tool_call>call:get_time{}<tool_call|>",
        "gemma", "gemma", thoughts="Hm.", content="I look.", calls=[KOELN, TIME],
    ),
    "gemma 4 with a file": Output(
        f'<|tool_call>call:write_file{{path:<|"|>a.py<|"|>,text:<|"|>{CODE.rstrip()}<|"|>,mode:null,'
        'tags:[<|"|>x<|"|>,<|"|></parameter<|"|>]}<tool_call|>',
        "gemma", "gemma", calls=[FILE],
    ),
    "qwen3-coder": Output(
        "I write.\n<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
        f"{CODE}</parameter>\n<parameter=mode>\nnull\n</parameter>\n<parameter=tags>\n"
        '["x", "<\\/parameter"]\n</parameter>\n</function>\n</tool_call>',
        tools="qwen3_coder", content="I write.\n", calls=[FILE],
    ),
    "qwen3-coder without the first marker": Output(
        "<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        tools="qwen3_coder", calls=[KOELN, TIME],
    ),
    "llama 4": Output(
        "<|python_start|>[get_weather(city='Köln', days=2), get_time()]<|python_end|>",
        tools="pythonic", calls=[KOELN, TIME],
    ),
    "llama 3.2": Output(
        '[write_file(path="a.py", text="def f(x):\\n    return {\\"a\\": x < 1}", mode=None, '
        'tags=["x", "</parameter"])]',
        tools="pythonic", calls=[FILE],
    ),
    "a list that is no call": Output("[1, 2, get_time]", tools="pythonic", content="[1, 2, get_time]"),
    "llama 3.1": Output(
        f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}', tools="llama3_json", calls=[KOELN]
    ),
    "deepseek-v3": Output(
        "I look." + _DEEPSEEK.format(
            _DEEPSEEK_CALL.format(f"function<｜tool▁sep｜>get_weather\n```json\n{WEATHER}\n```") + "\n"
            + _DEEPSEEK_CALL.format("function<｜tool▁sep｜>get_time\n```json\n{}\n```")
        ),
        tools="deepseek_v3", content="I look.", calls=[KOELN, TIME],
    ),
    "deepseek-v3.1": Output(
        "Hm.</think>" + _DEEPSEEK.format(
            _DEEPSEEK_CALL.format(f"get_weather<｜tool▁sep｜>{WEATHER}")
            + _DEEPSEEK_CALL.format("get_time<｜tool▁sep｜>{}")
        ),
        "think", "deepseek", "inside", "Hm.", calls=[KOELN, TIME],
    ),
    "kimi-k2": Output(
        "I look.<|tool_calls_section_begin|>" + _KIMI_CALL.format("get_weather", 0, WEATHER)
        + _KIMI_CALL.format("get_time", 1, "{}") + "<|tool_calls_section_end|>",
        tools="kimi", content="I look.", calls=[KOELN, TIME],
    ),
    "kimi-k2-thinking that does not end its thoughts": Output(
        "I call it. <|tool_calls_section_begin|>" + _KIMI_CALL.format("get_weather", 0, WEATHER)
        + "<|tool_calls_section_end|>",
        "think", "kimi", "inside", "I call it. ", calls=[KOELN],
    ),
    "granite 3": Output(
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "get_time", "arguments": {{}}}}]',
        tools="granite", calls=[KOELN, TIME],
    ),
    "granite 3.1, with the marker as text": Output(
        f"<tool_call>{_LIST}</tool_call>\n", tools="granite", calls=[KOELN, TIME]
    ),
    "granite 3.1, with single calls": Output(
        f'<tool_call>{{"name": "get_weather", "arguments": {WEATHER}}}</tool_call>', tools="granite", calls=[KOELN]
    ),
    "granite 3.2": Output(
        "Here is my thought process: It is < 3 °C.\nHere it is cold.\n\nHere is my response:\n\nIt is cold. ",
        "granite", "granite", thoughts="It is < 3 °C.\nHere it is cold.", content="It is cold. ",
    ),
    "granite 3.2 with a call": Output(
        f"Here's my thought process: I call it. Here's my response: <|tool_call|>{_LIST}",
        "granite", "granite", thoughts="I call it.", calls=[KOELN, TIME],
    ),
    "granite 3.2 that mentions the sentences": Output(
        "I say: Here is my response: no.", "granite", "granite", content="I say: Here is my response: no."
    ),
    "granite 3.3": Output(
        "<think>Hm.</think><response>It is < 3 °C.\n</response>",
        "think_response", "granite", thoughts="Hm.", content="It is < 3 °C.",
    ),
    "granite 4": Output(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>', tools="hermes", calls=[KOELN]
    ),
    "ernie": Output(
        "<think>\nHm.\n</think>\n\n<response>\nIt is sunny.\n\nReally.\n</response>\n",
        "think_response", "hermes", thoughts="Hm.", content="It is sunny.\n\nReally.",
    ),
    "ernie with a call": Output(
        f'Hm.\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n',
        "think_response", "hermes", "inside", "Hm.", calls=[KOELN],
    ),
    "hunyuan": Output(
        "<think>\nHm.\n</think>\n<answer>\nIt is <sunny>.\n</answer>",
        "hunyuan", "hunyuan", thoughts="Hm.", content="It is <sunny>.",
    ),
    "hunyuan with calls": Output(
        f"<think>\nHm.\n</think>\n<answer>\nI look.\n<tool_calls>\n{_LIST}\n</tool_calls>\n</answer>",
        "hunyuan", "hunyuan", thoughts="Hm.", content="I look.\n", calls=[KOELN, TIME],
    ),
    "jamba": Output(f" <tool_calls>{_LIST}</tool_calls>", tools="hunyuan", calls=[KOELN, TIME]),
    "nemotron nano": Output(
        f"<think>\nHm.\n</think>\n\nI look.<TOOLCALL>{_LIST}</TOOLCALL>",
        "think", "nemotron", thoughts="Hm.", content="I look.", calls=[KOELN, TIME],
    ),
    "phi-4-mini": Output(f"<|tool_call|>{_LIST}<|/tool_call|>", tools="phi4_mini", calls=[KOELN, TIME]),
    "phi-4-mini, from the text of the prompt": Output(f"functools{_LIST}", tools="phi4_mini", calls=[KOELN, TIME]),
    "phi-4-mini that speaks of Python": Output("Use functools.", tools="phi4_mini", content="Use functools."),
    "deepseek-v3.2": Output(
        f"Hm.</think>I write.\n\n<｜DSML｜function_calls>\n{_DSML_CALLS}</｜DSML｜function_calls>",
        "think", "deepseek_v32", "inside", "Hm.", "I write.\n\n", [FILE, ROME],
    ),
    "deepseek-v3.2 without thoughts": Output(
        f"<｜DSML｜function_calls>\n{_DSML_CALLS}</｜DSML｜function_calls>", tools="deepseek_v32", calls=[FILE, ROME]
    ),
    "deepseek-v3.2 without kinds": Output(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city">Köln'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        tools="deepseek_v32", calls=[KOELN],
    ),
    "deepseek-v4": Output(
        f"<｜DSML｜tool_calls>\n{_DSML_CALLS}</｜DSML｜tool_calls>", tools="deepseek_v4", calls=[FILE, ROME]
    ),
    "minimax-m2": Output(
        'Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Köln</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
        '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        "think", "minimax", "inside", "Hm.", "I look.\n", [KOELN, TIME],
    ),
    "minimax-m2 with a file": Output(
        f'<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="path">a.py</parameter>\n'
        f'<parameter name="text">{CODE.rstrip()}</parameter>\n<parameter name="mode">null</parameter>\n'
        '<parameter name="tags">["x", "<\\/parameter"]</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
        "</minimax:tool_call>\n",
        tools="minimax", calls=[FILE, TIME],
    ),
    "step-3": Output(
        "Hm.</think>I look.<｜tool_calls_begin｜>\n"
        + _STEP3_CALL.format("get_weather", _STEP3_KEY.format("city", "Köln") + _STEP3_KEY.format("days", "2")) + "\n"
        + _STEP3_CALL.format("get_time", "") + "\n<｜tool_calls_end｜>",
        "think", "step3", "inside", "Hm.", "I look.", [KOELN, TIME],
    ),
    "step-3 without thoughts": Output(
        "<｜tool_calls_begin｜>" + _STEP3_CALL.format("get_weather", _STEP3_KEY.format("city", "Rome"))
        + _STEP3_CALL.format("get_time", "") + "<｜tool_calls_end｜>",
        tools="step3", calls=[ROME, TIME],
    ),
    "seed-oss": Output(
        "<seed:think>Hm.\n<seed:cot_budget_reflect>64 tokens.</seed:cot_budget_reflect>\n</seed:think>\nI look.\n"
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Köln</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=get_time>\n</function>\n</seed:tool_call>",
        "seed_oss", "seed_oss",
        thoughts="Hm.\n<seed:cot_budget_reflect>64 tokens.</seed:cot_budget_reflect>", content="I look.\n",
        calls=[KOELN, TIME],
    ),
    "longcat": Output(
        f'<longcat_think>\nHm.\n</longcat_think>\nI look.<longcat_tool_call>\n{{"name": "get_weather", "arguments": '
        f'{WEATHER}}}\n</longcat_tool_call>\n<longcat_tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n'
        "</longcat_tool_call>",
        "longcat", "longcat", thoughts="Hm.", content="I look.", calls=[KOELN, TIME],
    ),
    "olmo-3": Output(
        "I look. <function_calls>\nget_weather(city=\"Köln\", days=2)\nget_time()\n</function_calls>",
        tools="olmo3", content="I look. ", calls=[KOELN, TIME],
    ),
    "olmo-3-think": Output(
        '<think>Hm.</think><function_calls>write_file(path="a.py", text="def f(x):\\n    return {\\"a\\": x < 1}", '
        'mode=null, tags=["x", "</parameter"])</function_calls>',
        "think", "olmo3", thoughts="Hm.", calls=[FILE],
    ),
    "lfm2": Output(
        '<|tool_call_start|>[get_weather(city="Köln", days=2), get_time()]<|tool_call_end|>I look.',
        tools="lfm2", content="I look.", calls=[KOELN, TIME],
    ),
    "granite 20b": Output(
        f'<function_call> {{"name": "get_weather", "arguments": {WEATHER}}}\n<function_call> {{"name": "get_time", '
        '"arguments": {}}',
        tools="granite_20b", calls=[KOELN, TIME],
    ),
}  # fmt: skip
