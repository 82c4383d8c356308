"""Jinja templates over examples and answers, for privileged teachers, judges and columns: sandboxed, and strict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, Undefined, UndefinedError, meta
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from opd.exits import Explained

FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class TemplateFault(Explained, ValueError):
    """A template fails for what it is given, and not because something is absent: its configuration is wrong."""


class Lacks(UndefinedError):
    """A template uses a name that the row does not have."""


class Absent(StrictUndefined):
    """What a template asks for and is not there. A name of the data is told from, say, the third part of a text."""

    def __init__(
        self, hint: str | None = None, obj: Any = missing, name: Any = None, exc: type[Exception] = UndefinedError
    ) -> None:
        if hint is None and isinstance(name, str) and exc is UndefinedError:
            hint, exc = f"there is no {name!r}", Lacks
        super().__init__(hint, obj, name, exc)  # pyright: ignore[reportArgumentType]  # jinja annotates too narrowly


class Method(Absent):
    """A mapping's own method under a name that is no key: absent, unless it is called."""

    def __init__(self, obj: Any, name: str, method: Any) -> None:
        super().__init__(None, obj, name)
        self.method = method


class KeysFirst(ImmutableSandboxedEnvironment):
    """A sandbox in which `columns.items` is the column of that name, whatever methods a mapping has."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A key of a mapping; else what the sandbox allows."""
        if not isinstance(obj, Mapping):
            return super().getattr(obj, attribute)
        if attribute in obj:
            return obj[attribute]
        found = super().getattr(obj, attribute)
        return found if isinstance(found, Undefined) or not callable(found) else Method(obj, attribute, found)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """The same by brackets."""
        if isinstance(obj, Mapping) and isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def call(self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What a call gives; `columns.items()` is one."""
        called = __obj.method if isinstance(__obj, Method) else __obj
        return super().call(__context, called, *args, **kwargs)


ENVIRONMENT = KeysFirst(undefined=Absent, keep_trailing_newline=True)


def names_in(template: str) -> set[str]:
    """What a template reads."""
    return meta.find_undeclared_variables(ENVIRONMENT.parse(template))


def compiled(template: str, known: set[str], more: str = "") -> Template:
    """The template, sandboxed. `more`: what a message adds of an unknown name, which stands there as {name}.

    Raises:
        ValueError: it is no valid Jinja, or names something that is not known.
    """
    try:
        unknown = sorted(names_in(template) - known)
        if not unknown:
            return ENVIRONMENT.from_string(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"template: no valid Jinja ({error.message}, line {error.lineno})") from error
    raise ValueError(
        f"template: there is no {unknown[0]!r}; it may use {', '.join(sorted(known))}{more.format(name=unknown[0])}"
    )


def rendered(template: Template, known: Mapping[str, Any]) -> str:
    """The text; `known` must have a `prompt`. What is None is undefined, and so is a column that is None.

    Raises:
        UndefinedError: the template uses something that this row does not have.
        TemplateFault: it fails for another reason.
    """
    there = {name: _there(value) if isinstance(value, Mapping) else value for name, value in known.items()}
    try:
        return template.render(_there(there))
    except UndefinedError:
        raise
    except FAULTS as error:
        said = str(error) or type(error).__name__
        raise TemplateFault(f"template: fails for the prompt {known['prompt'][:80]!r}: {said}; mend it") from None


def _there(known: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None: in a template that is undefined, not the word None."""
    return {name: value for name, value in known.items() if value is not None}
