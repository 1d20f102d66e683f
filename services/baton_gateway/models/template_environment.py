"""The sandbox in which chat templates run, with transformers' filters and functions. Its output is TemplateText.

Rendering that takes too long is stopped, whether the template or a message causes it. Jinja has no loops but `for` and
macros that call each other, so each iteration and each call of a macro checks the clock. The size of the result of one
operation is limited, too.
"""

import json
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.visitor
from jinja2.nodes import EvalContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..bounds import MAX_RENDERED_CHARS
from .template_text import TemplateText, concat

CONCAT = "baton_concat"
TICK = "baton_tick"
DEADLINE = "baton_deadline"  # template variable with the monotonic time at which rendering must end
MAX_REPEATS = 1_000_000  # the largest argument of a function, since it may be the length of the result
MAX_POWER_BITS = 4_096


class TooSlowError(Exception):
    """A template took too long to render."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template to TemplateText."""

    concat = staticmethod(concat)
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters["join"] = _join
        self.filters[CONCAT] = _concat
        self.filters[TICK] = _tick
        self.filters["center"] = _center
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile a template whose literals are TemplateText. Raises jinja2.TemplateError."""
        return self.from_string(_AddTicks().visit(_MarkLiterals(self).visit(self.parse(source))))

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, int) and value > MAX_REPEATS for value in (*args, *kwargs.values())):
            raise jinja2.TemplateError(f"a function is called with a number above {MAX_REPEATS}")
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_POWER_BITS:
                raise jinja2.TemplateError("a power is too large")
            return left**right
        for values, count in ((left, right), (right, left)):
            repeats = isinstance(values, str | list | tuple) and isinstance(count, int)
            if repeats and len(values) * count > MAX_RENDERED_CHARS:
                raise jinja2.TemplateError("a product is too long")
        return left * right


class _AddTicks(jinja2.visitor.NodeTransformer):
    """Inserts a check of the clock before the body of each loop and macro."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._ticking(node)

    def _ticking(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        none = jinja2.nodes.Const(None, lineno=node.lineno)
        tick = jinja2.nodes.Filter(none, TICK, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(tick, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


class _MarkLiterals(jinja2.visitor.NodeTransformer):
    """Replaces the string literals of a template with attributes of the environment that hold them as TemplateText."""

    def __init__(self, environment: TemplateEnvironment) -> None:
        self._environment = environment
        self._count = 0

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData) -> jinja2.nodes.Node:
        return self._marked(node, node.data)

    def visit_Const(self, node: jinja2.nodes.Const) -> jinja2.nodes.Node:
        return self._marked(node, node.value) if isinstance(node.value, str) else node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        """Turn `a ~ b` into a filter that keeps the origin of its text, which Jinja's own join loses."""
        parts = jinja2.nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno)
        return jinja2.nodes.Filter(parts, CONCAT, [], [], None, None, lineno=node.lineno)

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        node.node = self.visit(node.node)
        return node  # a key never becomes part of the output

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        return node  # compared values never become part of the output

    def _marked(self, node: jinja2.nodes.Node, text: str) -> jinja2.nodes.Node:
        name = f"baton_literal_{self._count}"
        self._count += 1
        setattr(self._environment, name, TemplateText.written(text))
        return jinja2.nodes.EnvironmentAttribute(name, lineno=node.lineno)


@jinja2.pass_context
def _tick(context: jinja2.runtime.Context, _: None) -> None:
    if time.monotonic() > context.parent[DEADLINE]:
        raise TooSlowError


def _center(value: str, width: int = 80) -> str:
    if width > MAX_REPEATS:
        raise jinja2.TemplateError(f"a text is centered in more than {MAX_REPEATS} characters")
    return jinja2.filters.do_center(value, width)


def _concat(values: list[Any]) -> str:
    return concat(map(str, values))


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training. It has no effect here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    separator = d if isinstance(d, TemplateText) else TemplateText(d)
    return jinja2.filters.sync_do_join(context, value, separator, attribute)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
