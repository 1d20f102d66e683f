"""The format of the answer to a chat: how its thoughts and tool calls are found, and the grammar of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_proto import serving_pb2 as pb

from ..errors import bad_request
from ..models.conversation import Conversation
from ..models.model import ServedModel
from ..reading.parts import AnswerReader, MakeReader
from ..reasoning.thought_reader import Place, ThoughtReader
from ..tools.call_rules import CallRules
from ..tools.tool_calls import ToolCalls
from ..tools.tool_parser import ToolParser
from .bodies import ChatCompletionRequest
from .grammar import parameters_of

_PROMPT_END = 16  # tokens at the end of a prompt that show whether it has begun thoughts


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """reader: creates a reader for each choice; None = all text is content. markers: kept in the text."""

    grammar: pb.Grammar | None
    reader: MakeReader | None
    markers: Sequence[str]


def answer_format(
    request: ChatCompletionRequest,
    served: ServedModel,
    given: pb.Grammar | None,
    conversation: Conversation,
    token_ids: Sequence[int],
) -> AnswerFormat:
    """Return the format of the answer to a prompt. given: the grammar that the request's own fields set.

    Raises ApiError when the model cannot write this format.
    """
    thoughts = served.thoughts
    parser = served.tool_parser if request.may_call or request.must_call else None
    place = _place(thoughts, served, conversation, token_ids)
    grammar = _required_calls(request, parser, served) if parser is not None and request.must_call else given
    if thoughts is not None:
        grammar = _with_thoughts(request, thoughts, place, grammar, served)
    elif request.thinking_token_budget is not None:
        raise _no_budget("this model writes no thoughts")
    kinds = [kind for kind in (thoughts, parser) if kind is not None]
    markers = tuple(dict.fromkeys(marker for kind in kinds for marker in kind.markers))
    return AnswerFormat(grammar, _make_reader(request, thoughts, place, parser), markers)


def _place(
    thoughts: type[ThoughtReader] | None, served: ServedModel, conversation: Conversation, token_ids: Sequence[int]
) -> Place:
    if thoughts is None:
        return "after"
    if conversation.continue_final_message:
        return thoughts.place(str(conversation.messages[-1].get("content") or ""), continues=True)
    # The library's own decoder starts threads, which cost more than these few tokens.
    end = served.tokenizer.detokenizer(skip_special_tokens=False).push(token_ids[-_PROMPT_END:])
    return thoughts.place(end, continues=False)


def _make_reader(
    request: ChatCompletionRequest, thoughts: type[ThoughtReader] | None, place: Place, parser: type[ToolParser] | None
) -> MakeReader | None:
    functions = {tool.function.name: tool.function.parameters for tool in request.tools or ()}
    parallel, whole = request.parallel_tool_calls is not False, not request.stream
    if thoughts is None and parser is None and not request.must_call:
        return None

    def make() -> AnswerReader:
        calls: ToolParser | ToolCalls | None = None
        if parser is not None:
            calls = parser(functions, parallel=parallel, whole=whole)
        elif request.must_call:
            calls = ToolCalls(request.called)
        return AnswerReader(None if thoughts is None else thoughts(place), calls)

    return make


def _required_calls(request: ChatCompletionRequest, parser: type[ToolParser], served: ServedModel) -> pb.Grammar:
    """Return the grammar of the tool calls that the request demands, in the model's own format."""
    functions: Mapping[str, Mapping[str, Any]] = {
        tool.function.name: parameters_of(tool)
        for tool in request.tools or ()
        if request.called in (None, tool.function.name)
    }
    parallel = request.called is None and request.parallel_tool_calls is not False
    rules = parser.rules(CallRules(functions, parallel, served.tokenizer.lark))
    return pb.Grammar(kind=pb.Grammar.KIND_LARK, text=rules, param="tools")


def _with_thoughts(
    request: ChatCompletionRequest,
    thoughts: type[ThoughtReader],
    place: Place,
    grammar: pb.Grammar | None,
    served: ServedModel,
) -> pb.Grammar | None:
    """Return a grammar of thoughts followed by the answer. It restricts the thoughts only by their budget."""
    budget, lark = request.thinking_token_budget, served.tokenizer.lark
    if place == "after" or (grammar is None and budget is None):
        return grammar
    try:
        rules = thoughts.thoughts_rules(place, budget, lark)
        if grammar is None:
            text = f"{thoughts.free_rules(place, lark)}\n{rules}"
            return pb.Grammar(kind=pb.Grammar.KIND_LARK, text=text, param="thinking_token_budget")
    except ValueError as error:
        if budget is None:
            return grammar  # without the tokens of its markers, the model writes no thoughts
        raise _no_budget(str(error)) from None
    opening = "" if request.must_call else lark.spell(thoughts.answer_opening()) if thoughts.answer_opening() else ""
    grammar.around = f"start: thoughts {opening} @answer\n{rules}"
    return grammar


def _no_budget(reason: str) -> Exception:
    return bad_request(f"'thinking_token_budget' cannot be enforced: {reason}.", "thinking_token_budget")
