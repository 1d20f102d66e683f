"""The sandbox in which chat templates run, with transformers' filters and functions. Its output is TemplateText."""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.visitor
from jinja2.nodes import EvalContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .template_text import TemplateText, concat

CONCAT = "baton_concat"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template to TemplateText."""

    concat = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters["join"] = _join
        self.filters[CONCAT] = _concat
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile a template whose literals are TemplateText. Raises jinja2.TemplateError."""
        return self.from_string(_MarkLiterals(self).visit(self.parse(source)))


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
        """`a ~ b` is compiled to a join that loses the origin, so it becomes a filter that keeps it."""
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
