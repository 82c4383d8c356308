"""Which of several addresses a request goes to: the least busy of those that live; one that failed rests a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

REST, LONGEST_REST = 5.0, 60.0  # seconds for which an address that failed is left out; twice as long every time


def checked_address(url: str) -> None:
    """Refuses what is no address, or what holds a key.

    Raises:
        ValueError: naming it, but not the key.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"urls: {url!r} is no address; it must start with http:// or https://")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"urls: {url!r} is no address: {error}") from error
    if not parsed.host:
        raise ValueError(f"urls: {url!r} names no host")
    if parsed.query or parsed.fragment:
        raise ValueError(f"urls: something stands behind the path of {parsed.host}; give the bare address")
    if parsed.userinfo:
        raise ValueError(f"urls: a key stands before {parsed.host}; put it into the variable that api_key_env names")


class Addresses:
    """Addresses that hold the same; several threads may ask."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._flying = dict.fromkeys(urls, 0)
        self._failures = dict.fromkeys(urls, 0)  # in a row
        self._awake = dict.fromkeys(urls, 0.0)  # time before which an address is left out

    @contextmanager
    def one(self, url: str | None = None) -> Iterator[str]:
        """`url`, or the address for the next request, which counts as busy inside the block.

        The least busy of those that live; where none does, the one whose rest ends first.
        """
        with self._lock:
            living = self._living()
            if url is None and living:
                url = min(living, key=lambda each: self._flying[each])
            elif url is None:
                url = min(self._awake, key=lambda each: self._awake[each])
            self._flying[url] += 1
        try:
            yield url
        finally:
            with self._lock:
                self._flying[url] -= 1

    def _living(self) -> list[str]:
        now = time.monotonic()
        return [url for url, awake in self._awake.items() if awake <= now]

    @property
    def any_lives(self) -> bool:
        """Whether an address can be asked at once."""
        with self._lock:
            return bool(self._living())

    def failed(self, url: str, wait: float = 0.0) -> None:
        """Lets an address rest, at least for the `wait` seconds that it asked for."""
        with self._lock:
            rest = min(LONGEST_REST, REST * 2.0 ** self._failures[url])
            self._failures[url] += 1
            self._awake[url] = time.monotonic() + max(rest, wait)

    def answered(self, url: str) -> None:
        """An address lives; a wait that it has asked for stands."""
        with self._lock:
            self._failures[url] = 0
