"""Tool calls of gpt-oss, in OpenAI's Harmony format: a message to functions.NAME, whose text is the arguments.

The recipient stands before or after the channel:

    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{…}<|call|>
"""

import re

from .call_rules import CallRules
from .tool_parser import NAME, ToolParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|call|>", "<|end|>", "<|return|>")
_STARTS = (START, CHANNEL, " to=functions.")
_HEAD = re.compile(
    rf"(?:<\|start\|>)?\s*(?:assistant)?(?: ?to=functions\.(?P<name>{NAME}))?\s*<\|channel\|>(?:commentary|analysis)"
    rf"(?: ?to=functions\.(?P<other>{NAME}))?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>\s*"
)


class HarmonyParser(ToolParser):
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

    @staticmethod
    def writes(template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        # A call ends the text, so there is only one.
        head = f"{CHANNEL}commentary to=functions.{{}} {CONSTRAIN}json{MESSAGE}".format
        return CallRules(calls.functions, False, calls.lark).listed(head=head, tail="")

    def _at_start(self) -> bool:
        return self._go(self._after_none)

    def _after_none(self) -> bool:
        text = self._rest
        at = min((at for marker in _STARTS if (at := text.find(marker)) >= 0), default=-1)
        if at >= 0:
            self._add_content(self._take(at))
            return self._go(self._head)
        self._add_content(self._take(len(text) - self._held(text, *_STARTS)))
        return False

    def _head(self) -> bool:
        return self._headed(_HEAD)

    def _reject(self, count: int) -> bool:
        return super()._reject(max(count, 1))  # so that the same marker is not found again

    def _after_call(self) -> bool:
        for marker in ENDS:
            if self._rest.startswith(marker):
                self._drop(len(marker))
                return self._go(self._after_none)
        return not self._may_become(*ENDS) and self._go(self._after_none)
