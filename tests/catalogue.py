"""Every loss term that the project ships, found by reading conf/ and the packages: what is added later is here too."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from opd import losses, weighting
from opd.config import load_config
from opd.losses import Correction, ReverseKL
from opd.terms import Aggregation, Term
from opd.weighting import Weigher
from tests.composing import composed
from tests.source_tree import ROOT

NAME = "term"  # how every term of the catalogue is called in a batch

Part = TypeVar("Part")


def stems(folder: str) -> list[str]:
    """Options of a group of conf/."""
    return sorted(path.stem for path in (ROOT / "conf" / folder).glob("*.yaml") if path.stem != "none")


@functools.cache
def catalogue() -> Mapping[str, Term]:
    """Every distinct term: the options of conf/loss and their choices, those of the methods, and reverse KL under each
    correction, weigher and aggregation.
    """
    found: dict[str, Term] = {}
    for label, term in _everything():
        if term not in [replace(other, weight=term.weight) for other in found.values()]:
            found[label] = term
    return found


def _everything() -> Iterator[tuple[str, Term]]:
    for option, term in options().items():
        yield option, term
        yield from ((f"{option} {_said(term.loss, loss)}", replace(term, loss=loss)) for loss in choices(term.loss))
    for method in stems("experiment/method"):
        terms = load_config(composed(f"experiment=method/{method}")).loss
        yield from ((f"{method}.{name}", replace(term, name=NAME)) for name, term in terms.items())
    plain = Term(NAME, ReverseKL(), teacher="main")
    for correction in _parts(losses, Correction):
        yield str(correction), replace(plain, correction=correction)
    for weigher in (made for part in _parts(weighting, Weigher) for made in (part, *choices(part))):
        yield str(weigher), replace(plain, weigh={"one": weigher})
    for way in get_args(Aggregation):
        yield way, replace(plain, aggregation=way, constant_tokens=7)


@functools.cache
def options() -> Mapping[str, Term]:
    """Every option of conf/loss as it stands there; all under one composition, which takes as long as that of one."""
    names = {f"of_{option}": option for option in stems("loss")}
    found = load_config(composed("experiment=quickstart", *(f"+loss@loss.{n}={o}" for n, o in names.items()))).loss
    return {option: replace(found[name], name=NAME) for name, option in names.items()}


def choices(part: Part) -> Iterator[Part]:
    """Copies of a loss or weigher with one choice (a literal or a flag), its own or an inner part's, made otherwise."""
    hints = get_type_hints(type(part))
    for field in fields(part):  # type: ignore[arg-type]
        value, hint = vars(part)[field.name], hints[field.name]
        others: list[Any] = [*choices(value)] if is_dataclass(value) and not isinstance(value, type) else []
        if get_origin(hint) is Literal:
            others = [option for option in get_args(hint) if option != value]
        elif hint is bool and not field.name.startswith("i_know"):
            others = [not value]
        for other in others:
            try:
                yield replace(part, **{field.name: other})  # type: ignore[type-var]
            except ValueError:  # refused: test_estimators.py and test_views.py name each with its reason
                continue


def _parts(module: Any, protocol: type) -> list[Any]:
    """The classes of a module that fill a protocol and have a default for every key, built."""
    classes = [found for found in vars(module).values() if is_dataclass(found) and isinstance(found, type)]
    made = [kind() for kind in classes if all(_has_default(field) for field in fields(kind))]
    return [part for part in made if isinstance(part, protocol)]


def _has_default(field: Any) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _said(before: Any, after: Any) -> str:
    """The choice that tells two copies apart, as `of=union`."""
    for field in fields(before):
        old, new = vars(before)[field.name], vars(after)[field.name]
        if old != new:
            return f"{field.name}.{_said(old, new)}" if is_dataclass(old) else f"{field.name}={new}"
    raise AssertionError(f"{before} was copied without a change")
