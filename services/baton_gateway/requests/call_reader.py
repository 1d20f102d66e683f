"""Chooses how the function calls in the answer to a chat are read."""

from ..tools.tool_calls import MakeReader, ToolCalls
from ..tools.tool_parser import ToolParser
from .bodies import ChatCompletionRequest


def call_reader(request: ChatCompletionRequest, parser: type[ToolParser] | None) -> MakeReader | None:
    """Return a function that creates a reader for each choice; None when the answer has no calls.

    parser: reads the calls that the model may choose to make; None = it makes none.
    """
    if request.must_call:
        return lambda: ToolCalls(request.called)
    if parser is None:
        return None
    names = {tool.function.name for tool in request.tools or ()}
    parallel = request.parallel_tool_calls is not False
    return lambda: parser(names, parallel=parallel, whole=not request.stream)
