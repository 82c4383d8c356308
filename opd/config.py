"""From composed YAML to checked objects. Below this door nobody sees a config."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from types import FunctionType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from opd.checkpoint import CheckpointConfig
from opd.credit import CreditAssigner
from opd.engine import EngineConfig
from opd.evaluate import EvalConfig
from opd.loggers import Logger
from opd.losses import Loss
from opd.parity import ParityConfig
from opd.prompts import DataConfig
from opd.rewards import RewardFunction, RewardTerm
from opd.schedules import Constant, Schedule
from opd.students import HFStudent, Sampler
from opd.teachers import Teacher
from opd.terms import Term


class ConfigError(ValueError):
    """A mistake in the configuration: what is wrong, under which key, and the way out."""


@dataclass(frozen=True)
class RewardPolicy:
    """What happens when a reward function misbehaves: seconds per call, and whether to stop or to skip the rows."""

    time_limit: float = 30.0
    on_error: Literal["raise", "skip"] = "raise"


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    experiment: str
    steps: int
    seed: int
    run_dir: str
    student: HFStudent
    sampler: Sampler
    loss: dict[str, Term]
    data: DataConfig
    engine: EngineConfig
    credit: CreditAssigner
    eval: EvalConfig
    checkpoint: CheckpointConfig
    teacher: dict[str, Teacher] = field(default_factory=dict)
    reward: dict[str, RewardTerm] = field(default_factory=dict)
    logger: dict[str, Logger] = field(default_factory=dict)
    reward_policy: RewardPolicy = field(default_factory=RewardPolicy)
    parity: ParityConfig = field(default_factory=ParityConfig)
    resume: Literal["auto", "never"] = "auto"
    stop_after: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be at least 1")


def load_config(cfg: DictConfig) -> TrainConfig:
    """The composed configuration as a checked object; constructors run, nothing heavy starts.

    Raises:
        ConfigError: an unknown key (with the nearest valid one), a wrong type, a missing or refused value.
    """
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {error.msg or error}") from error
    return _build(plain, TrainConfig, "")


def _build(node: Any, hint: Any, path: str) -> Any:
    """The value that `node` describes, of type `hint`."""
    if isinstance(node, Mapping):
        if hint is Term or hint is RewardTerm:
            return _build_named(node, hint, path)
        if "_target_" in node:
            return _check(_construct(_locate(node["_target_"], path), node, path), hint, path)
        target = _dataclass_of(hint)
        if target is not None:
            return _construct(target, node, path)
        inner = _value_hint(hint)
        return _check({key: _build(value, inner, f"{path}.{key}") for key, value in node.items()}, hint, path)
    if isinstance(node, list):
        inner = _value_hint(hint)
        return _check([_build(item, inner, f"{path}[{index}]") for index, item in enumerate(node)], hint, path)
    if hint is Schedule and isinstance(node, int | float):
        return Constant(float(node))
    if isinstance(node, str) and _expects_callable(hint):
        return _locate(node, path)
    return _check(node, hint, path)


def _build_named(node: Mapping[str, Any], wrapper: type, path: str) -> Any:
    """A loss or reward: keys of the wrapper (weight, teacher, ...) and keys of the formula stand side by side."""
    own = {f.name for f in fields(wrapper)} - {"name", "loss", "function"}
    formula = {key: value for key, value in node.items() if key not in own}
    settings = {key: value for key, value in node.items() if key in own}
    if "_target_" not in node:
        raise ConfigError(f"{path}: needs a _target_, the import path of a class; got the keys {sorted(node)}")
    inner, protocol = ("loss", Loss) if wrapper is Term else ("function", RewardFunction)
    value = _check(_construct(_locate(node["_target_"], path), formula, path, extra=own), protocol, path)
    hints = get_type_hints(wrapper)
    built = {key: _build(item, hints[key], f"{path}.{key}") for key, item in settings.items()}
    return wrapper(name=path.rpartition(".")[2], **{inner: value}, **built)


def _construct(target: Any, node: Mapping[str, Any], path: str, extra: set[str] = frozenset()) -> Any:
    """Builds a class; binds a function, or a class marked `_partial_`, to the keys given."""
    keys = {key: value for key, value in node.items() if key not in ("_target_", "_partial_")}
    partial = bool(node.get("_partial_")) or isinstance(target, FunctionType)
    name = f"{target.__module__}.{target.__qualname__}"
    parameters = inspect.signature(target).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        _refuse_unknown(keys, set(parameters), extra, path, name)
    hints = _hints(target)
    values = {key: _build(value, hints.get(key, Any), f"{path}.{key}".lstrip(".")) for key, value in keys.items()}
    if partial:
        return functools.partial(target, **values)
    missing = [
        key
        for key, p in parameters.items()
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.kind is not p.VAR_POSITIONAL and key not in values
    ]
    if missing:
        raise ConfigError(f"{_join(path, missing[0])}: missing; {name} needs it")
    try:
        return target(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path or 'config'}: {error}") from error


def _refuse_unknown(keys: Mapping[str, Any], valid: set[str], extra: set[str], path: str, name: str) -> None:
    for key in keys:
        if key not in valid:
            raise ConfigError(f"{_join(path, key)}: {name} has no such key{nearest(key, valid | extra)}")


def nearest(key: str, valid: set[str]) -> str:
    """A hint that names the closest valid keys."""
    close = get_close_matches(key, sorted(valid), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; valid keys: {', '.join(sorted(valid))}"


def _locate(path_of_object: Any, path: str) -> Any:
    try:
        return get_object(str(path_of_object))
    except Exception as error:  # Hydra re-raises whatever the imported module raised
        raise ConfigError(f"{path}: cannot import {path_of_object!r}: {error}") from error


def _check(value: Any, hint: Any, path: str) -> Any:
    """The value, coerced where it is plain data; ConfigError where it is not of the type `hint`."""
    if _is_plain(hint):
        try:
            return TypeAdapter(hint).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = _join(path, ".".join(str(part) for part in first["loc"] if not str(part).startswith(("literal", "function"))))
            raise ConfigError(f"{where}: {first['msg']}, got {first['input']!r}") from error
    options = _options(hint)
    bare = [get_origin(option) or option for option in options if option is not NoneType]
    classes = tuple(option for option in bare if isinstance(option, type))
    if Any in bare or not classes or (value is None and NoneType in options) or isinstance(value, classes):
        return value
    wanted = " or ".join(option.__name__ for option in classes)
    lacking = [name for option in classes for name in _members(option) if not hasattr(value, name)]
    how = f"it lacks {', '.join(lacking)}" if lacking and hasattr(value, "__dict__") else "name a class by _target_"
    raise ConfigError(f"{path}: expected a {wanted}, got {value!r}; {how}")


def _members(protocol: type) -> list[str]:
    """What a class must have to fulfil a protocol."""
    return [name for name in vars(protocol) if not name.startswith("_") or name == "__call__"]


def _is_plain(hint: Any) -> bool:
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return True
    return all(map(_is_plain, arguments)) if arguments else hint in (int, float, str, bool, NoneType)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _dataclass_of(hint: Any) -> type | None:
    found = [option for option in _options(hint) if isinstance(option, type) and is_dataclass(option)]
    return found[0] if found else None


def _value_hint(hint: Any) -> Any:
    for option in _options(hint):
        if get_origin(option) in (dict, list):
            return get_args(option)[-1]
    return Any


def _expects_callable(hint: Any) -> bool:
    return any(getattr(get_origin(option), "__name__", "") == "Callable" for option in _options(hint))


def _hints(target: Any) -> dict[str, Any]:
    """Type hints of our own components; other libraries' classes are checked by themselves."""
    if not (isinstance(target, type) and is_dataclass(target)):
        return {}
    try:
        return get_type_hints(target)
    except NameError:
        return {}


def _join(path: str, key: str) -> str:
    return f"{path}.{key}".strip(".")
