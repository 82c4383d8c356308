"""The process that runs reward functions, so that one that hangs or crashes takes nothing with it.

It is spawned (never forked: the trainer has threads and a GPU), ignores Ctrl-C, is killed at a call's limit and
replaced. It ends with its parent: at once while Python code runs, at the latest 30 s after a call's limit where C code
blocks the interpreter. Spawning imports the parent's main script again; `if __name__ == "__main__"` guards it as usual.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait
from time import monotonic
from typing import Any

import numpy as np
from pebble import ProcessExpired, ProcessPool
from torch import Tensor

from opd.records import Rollout

START_LIMIT = 120.0  # seconds for a process to start and import a function
LAST_RESORT = 30.0  # seconds past a call's limit after which an orphaned worker ends itself
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
TERMINATED = (signal.SIGTERM, -signal.SIGTERM)  # exit codes of a worker that was told to end, from outside


class ContractError(Exception):
    """The function answered with something other than one value per rollout."""


class TimedOut(Exception):
    """The call was killed at its limit."""


Answer = list[float | None] | Exception  # NaN stands for a value that is no number


def run_function(function: Callable[[Sequence[Rollout]], Any], rollouts: Sequence[Rollout]) -> Answer:
    """The function's values as plain numbers, or what it raised: to the stage, which has a policy, faults are data."""
    try:
        values = function(rollouts)
    except Exception as error:  # a user's function may raise anything
        return error
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return ContractError(f"returned {type(values).__name__}, expected a sequence of {len(rollouts)} values")
    if len(values) != len(rollouts):
        return ContractError(f"returned {len(values)} values, expected {len(rollouts)}, one per rollout")
    return [None if value is None else _number(value) for value in values]


class RewardWorker:
    """One process at a time, started by the first call. A worker ended from outside is replaced and asked once more."""

    def __init__(self) -> None:
        self.run_seconds = 0.0  # spent in functions so far; process starts and imports are not counted
        self._pool: ProcessPool | None = None

    def load(self, function: Callable[..., Any]) -> Exception | None:
        """Start the process if there is none and import the function in it; what went wrong, if anything did."""
        return self._with_second_try(lambda: self._load(function))

    def call(self, function: Callable[..., Any], rollouts: Sequence[Rollout], limit: float) -> Answer:
        """The function's values, or the exception that stands for its failure; `limit` excludes imports."""

        def ask() -> Answer:
            if (problem := self._load(function)) is not None:
                return problem
            begin = monotonic()
            try:
                return self._schedule(_answer, limit, pickle.dumps((function, rollouts)), limit)
            except FutureTimeout:
                return TimedOut()
            except UNPICKLABLE as error:
                return _caused(ContractError(f"was given rollouts that cannot be pickled ({error})"), error)
            finally:
                self.run_seconds += monotonic() - begin

        return self._with_second_try(ask)

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _load(self, function: Callable[..., Any]) -> Exception | None:
        try:
            problem = self._schedule(_import, START_LIMIT, pickle.dumps(function))
        except FutureTimeout:
            return ContractError(f"could not be imported in the reward worker within {START_LIMIT:g} s")
        except UNPICKLABLE as error:
            message = f"cannot be sent to the reward worker ({error}); define it at the top level of a module"
            return _caused(ContractError(message), error)
        if problem is None:
            return None
        message = f"cannot be imported in the reward worker: {type(problem).__name__}: {problem}"
        return _caused(ContractError(message), problem)

    def _with_second_try(self, ask: Callable[[], Any]) -> Any:
        for tries_left in (1, 0):
            try:
                return ask()
            except (ProcessExpired, RuntimeError) as error:  # RuntimeError is how pebble says that its pool is broken
                self.stop()
                own_fault = isinstance(error, ProcessExpired) and error.exitcode not in TERMINATED
                if own_fault or not tries_left:
                    code = f" with exit code {error.exitcode}" if isinstance(error, ProcessExpired) else ""
                    return _caused(RuntimeError(f"the reward worker died{code}"), error)
        raise AssertionError("the last try returns")

    def _schedule(self, task: Callable[..., Any], limit: float, *args: Any) -> Any:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPool(max_workers=1, initializer=_end_with_parent, context=context)
        future = self._pool.schedule(task, args=args, timeout=limit)  # counts from when the worker takes the task
        give_up = monotonic() + limit + START_LIMIT
        while not wait([future], timeout=1.0).done:
            if not self._pool.active or monotonic() > give_up:
                raise RuntimeError("the pool broke before it took the task")
        return future.result()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a spawned worker only"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _import(function_bytes: bytes) -> Exception | None:
    try:
        pickle.loads(function_bytes)
    except Exception as error:  # importing a user's module may raise anything
        return _portable(error)
    return None


def _answer(call_bytes: bytes, limit: float) -> Answer:
    faulthandler.dump_traceback_later(limit + LAST_RESORT, exit=True)
    try:
        answer = run_function(*pickle.loads(call_bytes))
    except BaseException as error:  # a SystemExit in the worker must not become one in the trainer
        answer = RuntimeError(f"{type(error).__name__}: {error}")
    finally:
        faulthandler.cancel_dump_traceback_later()
    return _portable(answer) if isinstance(answer, Exception) else answer


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def _portable(error: Exception) -> Exception:
    """The same exception with its traceback as a note; a stand-in if it does not survive pickling."""
    trace = "".join(traceback.format_exception(error))
    error.add_note(f"in the reward worker:\n{trace}")
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # a user's exception may fail to pickle in any way
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        stand_in.add_note(f"in the reward worker:\n{trace}")
        return stand_in


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
