"""Servers over HTTP: several addresses as one, requests in parallel, bounded retries, and an end when all are gone."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import httpx  # a client whose timeouts cover every phase, and that several threads may share
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_attempt,
    stop_before_delay,
    stop_when_event_set,
    wait_exponential_jitter,
)

from opd import ranks
from opd.addresses import Addresses, checked_address
from opd.exits import Explained
from opd.whole_answer import asked_wait, whole_answer

Answer = TypeVar("Answer")
Reader = Callable[[httpx.Response], Answer]
RETRIED = {408, 425, 429, 500, 502, 503, 504}  # statuses that another attempt may change
CONNECT = 10.0  # seconds within which whoever lives accepts a connection
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class RemoteError(Explained):
    """A server did not answer as it should; the message says which, what it said, and what to do."""


class _Passing(Exception):
    """One attempt failed in a way that the next may not; `wait`: seconds that the server asked for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True)
class RemoteConfig:
    """How to reach servers.

    Args:
        urls: addresses of servers that hold the same; requests go to the one with the fewest in flight, and one that
            failed is left out for a while.
        api_key_env: name of the environment variable with the key, sent as a bearer token; never logged.
        timeout: seconds for one attempt, from connecting to the last byte.
        give_up_after: seconds after which a request that always fails, at every address, ends the run.
        concurrency: requests in flight at a time.
    """

    urls: list[str]
    api_key_env: str = "OPD_API_KEY"
    timeout: float = 120.0
    give_up_after: float = 45.0
    concurrency: int = 4

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("urls: empty; give at least one address, such as http://127.0.0.1:8000")
        for url in self.urls:
            checked_address(url)
        if not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env, re.ASCII):
            raise ValueError("api_key_env: must be the name of an environment variable, not the key itself")
        if self.timeout <= 0 or self.give_up_after <= 0 or self.concurrency < 1:
            raise ValueError(
                f"timeout={self.timeout}, give_up_after={self.give_up_after}, concurrency={self.concurrency}: "
                "all must be positive"
            )


class Meter(Protocol):
    """Counts what requests cost, attempt by attempt."""

    def before(self, body: Any) -> int:
        """Called ahead of every attempt; a number for it. What it raises ends the request, and nothing is sent."""
        ...

    def after(self, number: int, outcome: httpx.Response | httpx.RequestError | None) -> None:
        """Called with what came of the attempt (None: nothing is known), before anybody looks into the answer."""
        ...


class Remote:
    """A pool of addresses under one name, which messages call by its config key; `meter` sees every POST request."""

    def __init__(self, key: str, config: RemoteConfig, meter: Meter | None = None) -> None:
        self.key, self.config, self.meter = key, config, meter
        token = self._token = os.environ.get(config.api_key_env, "").strip()
        if not (token.isascii() and token.isprintable()):  # the HTTP library would show it in its complaint
            raise RemoteError(f"{key}: the key in {config.api_key_env} holds characters that no HTTP header may have")
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(config.timeout, connect=min(config.timeout, CONNECT)),
            limits=httpx.Limits(max_connections=None),
            mounts={f"all://{host}": None for host in LOOPBACK},  # whatever proxy the environment names for the others
        )
        self._addresses = Addresses(config.urls)
        self._pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix=key)

    def ask_each(self, method: str, path: str, read: Reader[Answer], body: Any = None) -> dict[str, Answer]:
        """What every address that answers says, one request each; those that are gone are left out.

        Raises:
            RemoteError: none answers for `give_up_after` seconds, or one refuses for good.
        """

        def round_of_all() -> dict[str, Answer]:
            tasks = {
                url: self._pool.submit(self._attempt, method, path, lambda: body, read, url) for url in self.config.urls
            }
            failures = {url: task.exception() for url, task in tasks.items()}
            for failure in failures.values():
                if failure is not None and not isinstance(failure, _Passing):
                    raise failure
            if all(failures.values()):
                raise next(failure for failure in failures.values() if failure)
            return {url: task.result() for url, task in tasks.items() if not failures[url]}

        return self._patiently(round_of_all, threading.Event())

    def post_all(self, path: str, bodies: Sequence[Any], read: Callable[[int, httpx.Response], Answer]) -> list[Answer]:
        """One POST request per JSON body, in parallel; what `read` makes of each answer, given the body's number.

        An answer that `read` refuses with a ValueError is asked for again.

        Raises:
            RemoteError: a request failed for `give_up_after` seconds, or was refused for good.
        """
        return self._in_parallel(
            [
                (path, lambda body=body: body, lambda response, number=number: read(number, response))
                for number, body in enumerate(bodies)
            ]
        )

    def ask_rows(
        self,
        path: str,
        groups: Sequence[Sequence[int]],
        body: Callable[[list[int]], Any],
        read: Callable[[list[int], httpx.Response], Iterator[tuple[int, Answer]]],
    ) -> dict[int, Answer]:
        """One POST request per group of row numbers, in parallel; number -> answer of every row.

        `read` yields the rows that an answer holds, then raises a ValueError where one is missing or not usable: only
        what is still missing is asked for again.

        Raises:
            RemoteError: as for `post_all`.
        """
        found: dict[int, Answer] = {}

        def request(group: Sequence[int]) -> tuple[str, Callable[[], Any], Reader[None]]:
            def missing() -> list[int]:
                return [row for row in group if row not in found]

            def keep(response: httpx.Response) -> None:
                for row, answer in read(missing(), response):
                    found[row] = answer

            return path, lambda: body(missing()), keep

        self._in_parallel([request(group) for group in groups])
        return found

    def _in_parallel(self, requests: Sequence[tuple[str, Callable[[], Any], Reader[Answer]]]) -> list[Answer]:
        over = threading.Event()  # ends the retries of the others when one has failed for good
        tasks: list[Future[Answer]] = [
            self._pool.submit(self._patiently, lambda each=each: self._attempt("POST", each[0], each[1], each[2]), over)
            for each in requests
        ]
        try:
            ended, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            for task in ended:
                task.result()  # raises what one of them failed by, whichever that is
            return [task.result() for task in tasks]
        finally:
            over.set()
            for task in tasks:
                task.cancel()

    def _patiently(self, attempt: Callable[[], Answer], over: threading.Event) -> Answer:
        """The result of an attempt, repeated until `give_up_after`, and at least once per address."""
        attempts = Retrying(
            retry=retry_if_exception_type(_Passing),
            wait=self._pause,
            sleep=sleep_using_event(over),
            stop=stop_when_event_set(over)
            | (stop_before_delay(self.config.give_up_after) & stop_after_attempt(len(self.config.urls))),
            reraise=True,
        )
        try:
            return attempts(attempt)
        except _Passing as failure:
            raise RemoteError(
                f"{self.key}: no usable answer from {', '.join(self.config.urls)} within {self.config.give_up_after:g} "
                f"seconds ({failure}). Start the server, or correct remote.urls, and repeat the same command: a run "
                "that had begun continues."
            ) from failure

    def _pause(self, state: RetryCallState) -> float:
        """Nothing where another address lives; else what the server asked for, or a short wait that doubles."""
        if self._addresses.any_lives:
            return 0.0
        failure = state.outcome.exception() if state.outcome else None
        asked = failure.wait if isinstance(failure, _Passing) else 0.0
        return max(asked, wait_exponential_jitter(multiplier=0.1, max=5.0, jitter=0.1)(state))

    def _attempt(
        self, method: str, path: str, body: Callable[[], Any], read: Reader[Answer], address: str | None = None
    ) -> Answer:
        content = body()
        meter = self.meter if method == "POST" else None
        number = meter.before(content) if meter else 0
        outcome: httpx.Response | httpx.RequestError | None = None
        with self._addresses.one(address) as url:
            try:
                response = outcome = whole_answer(
                    self._client, method, url.rstrip("/") + path, content, self.config.timeout
                )
            except httpx.RequestError as error:  # refused, broken off, too slow, or a body that cannot be decoded
                outcome = error
                self._addresses.failed(url)
                raise _Passing(f"{url}: {type(error).__name__} {error}".rstrip()) from error
            finally:
                if meter:
                    meter.after(number, outcome)
        if response.status_code in RETRIED:
            wait = asked_wait(response)
            self._addresses.failed(url, wait)
            raise _Passing(f"{url}: {self._said(response)}", wait)
        if response.status_code != 200:
            raise RemoteError(f"{self.key}: {url}{path} refused the request: {self._said(response)}")
        try:
            answer = read(response)
        except ValueError as error:
            self._addresses.failed(url)
            raise _Passing(f"{url}: {error}") from error
        self._addresses.answered(url)
        return answer

    def _said(self, response: httpx.Response) -> str:
        """Status and message of an answer, at most 300 characters; some servers repeat the key in it."""
        text = " ".join(response.text.split())
        return f"status {response.status_code}: {(text.replace(self._token, '***') if self._token else text)[:300]}"

    def close(self, wait: bool = False) -> None:
        """Ends all connections; `wait`: after the requests that are under way."""
        self._pool.shutdown(wait=wait, cancel_futures=True)
        self._client.close()


def on_all_ranks(call: Callable[[], Answer]) -> Answer:
    """The result of `call`; where a server fails one rank all raise, to save and leave together."""
    try:
        result, failure = call(), ""
    except RemoteError as error:
        result, failure = None, str(error)
    failures = [each for each in ranks.gather(failure) if each]
    if failures:
        raise RemoteError(failures[0])
    return cast(Answer, result)
