"""Chat templates, rendered as transformers renders them but with a bound on the work of one rendering.

A template is a program from a checkpoint, and what it loops over comes from clients. Loop turns, calls and the text
that they make are counted; the count depends on nothing but the template and its variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS = 100_000
STEPS_PER_MESSAGE = 200
"""Loop turns and calls that a rendering may take: so many, and so many for each message. A thousand characters that
they make count as one more."""
LONGEST_TEXT = 2**25
"""Characters or entries of any value."""
_MOST_BITS = 2**17
_INSTANT = frozenset({"length", "count", "first", "last", "default", "d"})
"""Filters that do not go through what they are given."""
_WIDE = re.compile(r"\d{6}|\*")
"""In a format string: a width that pads to a megabyte or is given apart."""

_steps_left: ContextVar[int | None] = ContextVar("steps_left", default=None)


class TemplateFailure(Exception):
    """A template cannot be read, refuses the messages, fails on them, or does too much. Its text says which."""


def render(template: str, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """The text of a conversation.

    Args:
        template: Jinja, as `PreTrainedTokenizerFast.get_chat_template` gives it.
        messages: as the template reads them.
        variables: what else it reads: special tokens, `tools`, `add_generation_prompt`.

    Raises:
        TemplateFailure: it makes no text of them.
    """
    token = _steps_left.set(STEPS + STEPS_PER_MESSAGE * len(messages))
    try:
        return _compile(template).render({"tools": None, "documents": None, **variables, "messages": messages})
    except TemplateSyntaxError as error:
        raise TemplateFailure(f"the chat template is no valid Jinja (line {error.lineno}: {error.message})") from None
    except _TooMuch as error:
        raise TemplateFailure(f"the chat template does too much with the messages: {error}") from None
    except TemplateError as error:
        raise TemplateFailure(f"the chat template refuses the messages: {error}") from None
    except Exception as error:  # it is a program, and what clients give it may be anything
        raise TemplateFailure(f"the chat template fails on the messages ({type(error).__name__}: {error})") from None
    finally:
        _steps_left.reset(token)


class _TooMuch(TemplateError):
    """The bound is reached."""


def _spend(steps: int) -> None:
    left = _steps_left.get()
    if left is None:  # a constant, folded while a template is compiled
        return
    if left < steps:
        raise _TooMuch(f"it takes more than {STEPS:,} steps and {STEPS_PER_MESSAGE} a message")
    _steps_left.set(left - steps)


def _require_length(length: int) -> None:
    if length > LONGEST_TEXT:
        raise _TooMuch(f"it makes a text or list longer than {LONGEST_TEXT:,}")


def _measured(value: Any) -> Any:
    """A value that a template made, its size counted."""
    if isinstance(value, str | list | tuple | dict):
        _require_length(len(value))
        _spend(len(value) // 1000)
    return value


def _written(value: Any) -> Any:
    """A value that is about to be made text: of what has parts, all parts count, as often as they occur."""
    if isinstance(value, str):
        return _measured(value)
    count, parts = 0, [value]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            parts += part
        _measured(part)
        if part and not isinstance(part, str):
            count += 1
            _spend(count % 10 == 0)
    return value


def _foresee(name: str, subject: object, arguments: Sequence[Any]) -> None:
    """Refuse a call whose result would be too large, before it is made."""
    for argument in arguments:
        if isinstance(argument, int):
            _require_length(argument)
    if not isinstance(subject, str):
        subject, arguments = "", (subject, *arguments)
    texts = [argument for argument in arguments if isinstance(argument, str)]
    if name == "replace" and len(texts) > 1:
        _require_length(len(subject) + subject.count(texts[0]) * len(texts[1]))
    elif name == "join":
        counts = [len(argument) for argument in arguments if isinstance(argument, list | tuple)]
        _require_length(max([len(subject), *map(len, texts)]) * max(counts, default=1))
    elif name in ("format", "format_map") and _WIDE.search(subject):
        raise _TooMuch("it formats to a width of six digits")


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter, counted as a call, and by what it goes through."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        values = arguments[passed:]
        gone_through = () if name in _INSTANT else values
        _spend(1 + sum(len(value) for value in gone_through if isinstance(value, list | tuple | dict)) // 10)
        _foresee(name, values[0] if values else None, [*values[1:], *options.values()])
        return _measured(function(*arguments, **options))

    return counted


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(
        _written(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _GenerationTag(Extension):
    """`{% generation %}`, which marks what an assistant wrote for those who train on it."""

    tags = {"generation"}  # noqa: RUF012  (so declared in jinja2)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """See `Extension.parse`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body, lineno=line)

    def _as_it_is(self, caller: Macro) -> str:
        return str(caller())


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers, counting."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_written
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _counted(name, function) for name, function in self.filters.items()}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]  # text at random, of any length

    def call(self, context: Context, obj: Any, /, *arguments: Any, **options: Any) -> Any:
        """See `SandboxedEnvironment.call`."""
        _spend(1)
        subject = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # jinja2 wraps `str.format`
        _foresee(getattr(obj, "__name__", ""), subject, [*arguments, *options.values()])
        return _measured(super().call(context, obj, *arguments, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See `SandboxedEnvironment.call_binop`."""
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise _TooMuch(f"it makes a number of more than {_MOST_BITS:,} bits")
        elif operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(count, int):
                    _require_length(len(sized) * count)
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise _TooMuch("it formats to a width of six digits")
        return _measured(super().call_binop(context, operator, left, right))

    def turn(self, steps: int) -> str:
        """Begin a loop's turn, or a macro's; in the code of templates, whose calls are counted beside."""
        _spend(steps)
        return ""

    def concatenate(self, *parts: Any) -> str:
        """`~`, in the code of templates."""
        texts = [str(_written(part)) for part in parts]
        _require_length(sum(map(len, texts)))
        return str_join(texts)


class _CountTurns(NodeTransformer):
    """Makes loops and macros count their turns by the text that they hold, and `~` its result."""

    def _with_turn(self, node: Any) -> Any:
        node = self.generic_visit(node)
        held = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = nodes.Call(nodes.EnvironmentAttribute("turn"), [nodes.Const(held // 1000)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_turn

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        """See `Environment.concatenate`."""
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None, lineno=node.lineno)


_SANDBOX = _Sandbox()


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    tree = _CountTurns().visit(_SANDBOX.parse(template))
    return _SANDBOX.from_string(tree.set_environment(_SANDBOX))
