"""Servers over HTTP: several addresses as one, requests in parallel, bounded retries, and an end when all are gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import httpx  # a client whose timeouts cover every phase, and that several threads may share
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from opd import ranks

Answer = TypeVar("Answer")
RETRIED = {408, 425, 429, 500, 502, 503, 504}  # statuses that another attempt may change
REST = 5.0  # seconds for which an address that failed is left out while others live


class RemoteError(RuntimeError):
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
        urls: addresses of servers that hold the same; requests go to the one with the fewest in flight.
        api_key_env: name of the environment variable with the key, sent as a bearer token; never logged.
        timeout: seconds for one attempt, from connecting to the last byte.
        give_up_after: seconds after which a request that always fails ends the run.
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
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: {url!r} is no address; it must start with http:// or https://")
        if self.timeout <= 0 or self.give_up_after <= 0 or self.concurrency < 1:
            raise ValueError(
                f"timeout={self.timeout}, give_up_after={self.give_up_after}, concurrency={self.concurrency}: "
                "all must be positive"
            )


class Remote:
    """A pool of addresses under one name, which messages call by its config key."""

    def __init__(self, key: str, config: RemoteConfig) -> None:
        self.key, self.config = key, config
        token = os.environ.get(config.api_key_env, "")
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=config.timeout,
            limits=httpx.Limits(max_connections=None),
        )
        self._lock = threading.Lock()
        self._flying = dict.fromkeys(config.urls, 0)
        self._resting = dict.fromkeys(config.urls, 0.0)  # time before which an address is left out
        self._pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix=key)

    def get(self, path: str) -> Any:
        """The JSON of a GET request."""
        return self._ask("GET", path, None, lambda response: response.json())

    def post_all(
        self, path: str, bodies: Sequence[Any], read: Callable[[int, httpx.Response], Answer]
    ) -> list[Answer]:
        """One POST request per JSON body, in parallel; what `read` makes of each answer, given the body's number.

        An answer that `read` refuses with a ValueError is asked for again.

        Raises:
            RemoteError: a request failed for `give_up_after` seconds, or was refused for good.
        """
        tasks = [
            self._pool.submit(self._ask, "POST", path, body, lambda response, number=number: read(number, response))
            for number, body in enumerate(bodies)
        ]
        try:
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    def _ask(self, method: str, path: str, body: Any, read: Callable[[httpx.Response], Answer]) -> Answer:
        attempts = Retrying(
            retry=retry_if_exception_type(_Passing),
            wait=self._pause,
            stop=stop_after_delay(self.config.give_up_after),
            reraise=True,
        )
        try:
            return attempts(self._attempt, method, path, body, read)
        except _Passing as failure:
            raise RemoteError(
                f"{self.key}: no usable answer from {', '.join(self.config.urls)} for {self.config.give_up_after:g} "
                f"seconds ({failure}). Start the server again and repeat the same command: the run continues."
            ) from failure

    @staticmethod
    def _pause(state: RetryCallState) -> float:
        """What the server asked for, or a short wait that doubles."""
        failure = state.outcome.exception() if state.outcome else None
        asked = failure.wait if isinstance(failure, _Passing) else 0.0
        return max(asked, wait_exponential_jitter(initial=0.1, max=5.0)(state))

    def _attempt(self, method: str, path: str, body: Any, read: Callable[[httpx.Response], Answer]) -> Answer:
        url = self._choose()
        try:
            response = self._client.request(method, url.rstrip("/") + path, json=body)
        except httpx.TransportError as error:  # refused, broken off, or too slow
            self._rest(url)
            raise _Passing(f"{url}: {type(error).__name__} {error}".rstrip()) from error
        finally:
            with self._lock:
                self._flying[url] -= 1
        if response.status_code in RETRIED:
            if response.status_code >= 500:
                self._rest(url)
            raise _Passing(f"{url}: {_said(response)}", _asked_wait(response))
        if response.status_code != 200:
            raise RemoteError(f"{self.key}: {url}{path} refused the request: {_said(response)}")
        try:
            return read(response)
        except ValueError as error:
            raise _Passing(f"{url}: {error}") from error

    def _choose(self) -> str:
        """The address with the fewest requests among those that live, or among all when none does."""
        with self._lock:
            now = time.monotonic()
            living = [url for url in self._flying if self._resting[url] <= now] or list(self._flying)
            url = min(living, key=lambda each: self._flying[each])
            self._flying[url] += 1
            return url

    def _rest(self, url: str) -> None:
        with self._lock:
            self._resting[url] = time.monotonic() + REST

    def close(self) -> None:
        """Ends all connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
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


def _asked_wait(response: httpx.Response) -> float:
    """Seconds of a Retry-After header; 0 without one, or where it is a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.replace(".", "", 1).isdigit() else 0.0


def _said(response: httpx.Response) -> str:
    """Status and message of an answer, at most 300 characters."""
    return f"status {response.status_code}: {' '.join(response.text.split())[:300]}"
