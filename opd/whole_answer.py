"""An HTTP answer with all of its body within a time, and what a server that has no time asks for."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

OF_THE_WIRE = {b"content-encoding", b"content-length", b"transfer-encoding"}  # headers that describe the undecoded body


def whole_answer(client: httpx.Client, method: str, url: str, body: Any, timeout: float) -> httpx.Response:
    """The answer to a request with a JSON body, read to its end. The client's own limits are for each piece alone.

    Raises:
        httpx.TransportError: no connection, or none that lasted; `httpx.ReadTimeout` after `timeout` seconds.
    """
    ends = time.monotonic() + timeout
    with client.stream(method, url, json=body) as response:
        parts = []
        for part in response.iter_bytes():
            parts.append(part)
            if time.monotonic() > ends:
                raise httpx.ReadTimeout(f"the answer took more than {timeout:g} seconds")
    headers = [(name, value) for name, value in response.headers.raw if name.lower() not in OF_THE_WIRE]
    return httpx.Response(response.status_code, headers=headers, content=b"".join(parts), request=response.request)


def asked_wait(response: httpx.Response) -> float:
    """Seconds of a Retry-After header, which is a number or a date; 0 without one that can be read."""
    value = response.headers.get("retry-after", "")
    if value.isascii() and value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without a time zone
        return 0.0
