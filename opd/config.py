"""From composed YAML to checked objects. Below this door nobody sees a config."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from types import FunctionType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from opd.alarms import AlarmConfig
from opd.checkpoint import CheckpointConfig
from opd.credit import CreditAssigner
from opd.diagnostics import DiagnosticsConfig
from opd.engine import EngineConfig
from opd.evaluate import EvalConfig
from opd.loggers import Logger
from opd.losses import Loss
from opd.parity import ParityConfig
from opd.prompts import DataConfig
from opd.rewards import RewardFunction, RewardTerm
from opd.schedules import Constant, Schedule, Scheduled
from opd.students import HFStudent, Sampler
from opd.teachers import Teacher
from opd.terms import Term

Built = TypeVar("Built")
WAYS_OUT: dict[type, str] = {
    Loss: "a class declares `needs = frozenset({...})`, a function goes into opd.losses.Formula, which takes `needs`",
    Schedule: "or give a number",
}


class ConfigError(ValueError):
    """A mistake in the configuration: what is wrong, under which key, and the way out."""


@dataclass(frozen=True)
class RewardPolicy:
    """What happens when a reward function misbehaves: seconds per call, and whether to stop or to skip the rows."""

    time_limit: float = 30.0
    on_error: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        if not self.time_limit > 0:
            raise ValueError(f"time_limit={self.time_limit}: must be positive")


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
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    resume: Literal["auto", "never"] = "auto"
    stop_after: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be at least 1")
        if self.stop_after is not None and self.stop_after < 1:
            raise ValueError(f"stop_after={self.stop_after}: must be at least 1, or null to run all steps")
        if not self.run_dir:
            raise ValueError("run_dir: empty; name a folder")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed}: must be at least 0 and below 2**31")
        for key in ("loss", "teacher", "reward"):
            dotted = [name for name in vars(self)[key] if "." in name]
            if dotted:
                raise ValueError(f"{key}: the name {dotted[0]!r} holds a dot, which separates keys; rename it")


def load_config(cfg: DictConfig) -> TrainConfig:
    """The composed configuration as a checked object; constructors run, nothing heavy starts.

    Raises:
        ConfigError: an unknown key (with the nearest valid one), a wrong type, a missing or refused value.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        plain = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error.msg or error).partition(chr(10))[0]}") from error
    if missing:
        raise ConfigError("\n".join(f"{key}: missing, and it has no default; give {key}=..." for key in missing))
    return _build(plain, TrainConfig, "")


def build(settings: Mapping[str, Any], target: type[Built]) -> Built:
    """A command's own settings as its checked dataclass; refused as in `load_config`."""
    return _build(settings, target, "")


def _build(node: Any, hint: Any, path: str) -> Any:
    """The value that `node` describes, of type `hint`."""
    if isinstance(node, Mapping):
        if "_target_" in node and not isinstance(node["_target_"], str):
            raise ConfigError(f"{path}._target_: must be the import path of a class, got {node['_target_']!r}")
        if hint is Term or hint is RewardTerm:
            return _build_named(node, hint, path)
        if "_target_" in node:
            return _check(_construct(_locate(node["_target_"], path), node, path), hint, path)
        target = _dataclass_of(hint)
        if target is not None:
            return _construct(target, node, path)
        inner = _value_hint(hint)
        return _check(_build_all({key: (value, inner) for key, value in node.items()}, path), hint, path)
    if isinstance(node, list):
        inner = _value_hint(hint)
        return _check([_build(item, inner, f"{path}[{index}]") for index, item in enumerate(node)], hint, path)
    if hint is Schedule and isinstance(node, int | float) and not isinstance(node, bool):
        return Constant(float(node))
    if hint == Scheduled and isinstance(node, int) and not isinstance(node, bool):
        return float(node)
    if isinstance(node, str) and _expects_callable(hint):
        return _locate(node, path)
    return _check(node, hint, path)


def _build_all(nodes: Mapping[str, tuple[Any, Any]], path: str, problems: Sequence[str] = ()) -> dict[str, Any]:
    """The values of named (node, hint) pairs; ConfigError with all their problems, one per line."""
    values: dict[str, Any] = {}
    found = list(problems)
    for key, (node, hint) in nodes.items():
        try:
            values[key] = _build(node, hint, _join(path, key))
        except ConfigError as error:
            found.append(str(error))
    if found:
        raise ConfigError("\n".join(found))
    return values


def _build_named(node: Mapping[str, Any], wrapper: type, path: str) -> Any:
    """A loss or reward: keys of the wrapper (weight, teacher, ...) and keys of the formula stand side by side."""
    own = {f.name for f in fields(wrapper)} - {"name", "loss", "function"}
    formula = {key: value for key, value in node.items() if key not in own}
    settings = {key: value for key, value in node.items() if key in own}
    if "_target_" not in node:
        raise ConfigError(f"{path}: needs a _target_, the import path of a class (to drop it: ~{path})")
    inner, protocol = ("loss", Loss) if wrapper is Term else ("function", RewardFunction)
    value = _check(_construct(_locate(node["_target_"], path), formula, path, extra=own), protocol, path)
    hints = get_type_hints(wrapper)
    built = _build_all({key: (item, hints[key]) for key, item in settings.items()}, path)
    return wrapper(name=path.rpartition(".")[2], **{inner: value}, **built)


def _construct(target: Any, node: Mapping[str, Any], path: str, extra: AbstractSet[str] = frozenset()) -> Any:
    """Builds a class; binds a function, or a class marked `_partial_`, to the keys given."""
    keys = {key: value for key, value in node.items() if key not in ("_target_", "_partial_")}
    partial = bool(node.get("_partial_")) or isinstance(target, FunctionType)
    name = f"{target.__module__}.{target.__qualname__}"
    parameters = inspect.signature(target).parameters
    valid = {k for k, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [key for key in keys if key not in valid]
    wrong = [f"{_join(path, key)}: {name} has no such key{nearest(key, valid | extra)}" for key in unknown]
    hints = _hints(target)
    known = {key: (value, hints.get(key, Any)) for key, value in keys.items() if key not in unknown}
    values = _build_all(known, path, wrong)
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


def nearest(key: str, valid: set[str], kind: str = "keys") -> str:
    """A hint that names the closest of the valid keys (or names of another kind)."""
    close = get_close_matches(key, sorted(valid), n=2, cutoff=0.5)
    listed = ", ".join(sorted(valid)[:40]) + (" (~KEY drops what an experiment has set)" if kind == "keys" else "")
    return f"; did you mean {' or '.join(close)}?" if close else f"; valid {kind}: {listed}"


def _locate(name: str, path: str) -> Any:
    """The class or function that an import path names."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if f"{module_name}.".startswith(f"{error.name}."):  # not a module: perhaps a class in one
                continue
            raise ConfigError(f"{path}: importing {module_name} failed: {error}") from error
        except Exception as error:  # a user's module may raise anything
            raise ConfigError(f"{path}: importing {module_name} failed: {error!r}") from error
        for part in parts[cut:]:
            try:
                found = getattr(found, part)
            except AttributeError as error:
                hint = nearest(part, {known for known in dir(found) if not known.startswith("_")}, "names")
                raise ConfigError(f"{path}: cannot import {name!r}: {module_name} has no {part}{hint}") from error
        if not callable(found):
            raise ConfigError(f"{path}: {name!r} is neither a class nor a function")
        return found
    raise ConfigError(
        f"{path}: cannot import {name!r}: no module {parts[0]!r}; write package.module.Class, and set PYTHONPATH if "
        "the package is not installed"
    )


def _check(value: Any, hint: Any, path: str) -> Any:
    """The value, coerced where it is plain data; ConfigError where it is not of the type `hint`."""
    if _is_plain(hint):
        try:
            return TypeAdapter(hint).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = _join(
                path, ".".join(str(part) for part in first["loc"] if not str(part).startswith(("literal", "function")))
            )
            raise ConfigError(f"{where}: {first['msg']}, got {first['input']!r}") from error
    options = _options(hint)
    bare = [get_origin(option) or option for option in options if option is not NoneType]
    classes = tuple(option for option in bare if isinstance(option, type))
    if Any in bare or not classes or (value is None and NoneType in options) or isinstance(value, classes):
        return value
    wanted = " or ".join(option.__name__ for option in classes)
    lacking = [name for option in classes for name in _members(option) if not hasattr(value, name)]
    how = f"it lacks {', '.join(lacking)}" if lacking and hasattr(value, "__dict__") else "name a class by _target_"
    how += "".join(f"; {WAYS_OUT[option]}" for option in classes if option in WAYS_OUT)
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
    return next((option for option in _options(hint) if isinstance(option, type) and is_dataclass(option)), None)


def _value_hint(hint: Any) -> Any:
    return next((get_args(option)[-1] for option in _options(hint) if get_origin(option) in (dict, list)), Any)


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
