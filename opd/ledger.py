"""What API requests have cost so far, on disk, and the budget that stops a run before it is exceeded."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import httpx

from opd.answer_cache import trouble
from opd.remote import RemoteError

NOT_SENT = (
    httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.LocalProtocolError, httpx.UnsupportedProtocol,
)  # fmt: skip
MESSAGE_TOKENS, REQUEST_TOKENS = 16, 64  # more than any chat template puts around a message and around them all
EXPLAINED_TOKENS = 1024  # the same for what it says of tools, or of the form of the answer
EXPLAINED = ("tools", "functions", "response_format")
SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (requests INTEGER, input INTEGER, output INTEGER, money REAL);
INSERT INTO spent SELECT 0, 0, 0, 0.0 WHERE NOT EXISTS (SELECT 1 FROM spent);
CREATE TABLE IF NOT EXISTS open (number INTEGER PRIMARY KEY, input INTEGER, output INTEGER, money REAL);
"""
TOTAL = """
SELECT sum(requests), sum(input), sum(output), sum(money) FROM (
  SELECT requests, input, output, money FROM spent UNION ALL SELECT 1, input, output, money FROM open)
"""


class BudgetSpent(RemoteError):
    """The next request might exceed the budget; it has not been sent."""


@dataclass(frozen=True)
class Account:
    """Where an API's costs are noted, at which prices, and how much may be spent.

    Parts of a run that name the same folder share one ledger, and with it the budget; so do runs.

    Args:
        folder: of the ledger, and of the answers kept.
        cache: another folder for the answers, to share them between runs; null for `folder`.
        input_price, output_price: money per million tokens.
        money: stop before the ledger's sum exceeds this; null for no limit.
        requests: the same for requests.
    """

    folder: str
    cache: str | None = None
    input_price: float = 0.0
    output_price: float = 0.0
    money: float | None = None
    requests: int | None = None

    def __post_init__(self) -> None:
        for name in ("input_price", "output_price", "money", "requests"):
            value = vars(self)[name]
            if value is not None and not (isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: must be a number of at least 0")
        if self.money is not None and not (self.input_price or self.output_price):
            raise ValueError(
                f"money={self.money:g}: without prices nothing would ever be spent; set input_price and output_price "
                "(money per million tokens), or limit the requests"
            )

    def price(self, input_tokens: float, output_tokens: float) -> float:
        """Money for so many tokens."""
        return (self.input_price * input_tokens + self.output_price * output_tokens) / 1e6


@dataclass(frozen=True)
class Totals:
    """What a ledger holds; requests whose outcome is not known count at their largest possible cost."""

    requests: int
    input_tokens: int
    output_tokens: int
    money: float


class Ledger:
    """One account's ledger, as a meter of requests (`opd.remote.Meter`); several processes may share the file.

    An attempt is entered at its largest possible cost before it is sent: every byte of the request a token, and
    `max_tokens` of output. The answer's own count replaces that. An attempt that was refused costs nothing; one that
    broke off or timed out may have been billed, and stays at its largest cost.
    """

    def __init__(self, key: str, account: Account) -> None:
        self.key, self.account = key, account
        folder = Path(account.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "ledger.sqlite"
        self._settled = threading.Condition()
        self._under_way = 0  # attempts of this process
        with self._transaction() as database:
            for statement in SCHEMA.split(";"):
                database.execute(statement)

    def before(self, body: Any) -> int:
        """Enters an attempt at its largest cost; where that does not fit, waits for those under way to cost less.

        Raises:
            BudgetSpent: it would not fit although none is under way.
        """
        worst = (input_bound(body), output_limit(body))
        with self._settled:
            while (number := self._enter(*worst)) is None:
                if not self._under_way:
                    raise BudgetSpent(self._exhausted(self.account.price(*worst)))
                self._settled.wait()
            self._under_way += 1
        return number

    def after(self, number: int, outcome: httpx.Response | httpx.RequestError | None) -> None:
        """Replaces the largest cost of an attempt by what it did cost; None: nobody knows what came of it.

        Raises:
            RemoteError: the ledger cannot be written; the attempt then stays at its largest cost.
        """
        refused = isinstance(outcome, httpx.Response) and outcome.status_code != 200
        usage = {} if refused or not isinstance(outcome, httpx.Response) else _usage(outcome)
        with self._settled:
            try:
                self._leave(number, None if refused or isinstance(outcome, NOT_SENT) else usage)
            finally:  # whoever waits for it must not wait for ever
                self._under_way -= 1
                self._settled.notify_all()

    def totals(self) -> Totals:
        """What has been spent, by all runs that share the ledger."""
        with self._transaction() as database:
            return Totals(*database.execute(TOTAL).fetchone())

    def _enter(self, input_tokens: int, output_tokens: int) -> int | None:
        money = self.account.price(input_tokens, output_tokens)
        with self._transaction() as database:
            requests, _, _, spent = database.execute(TOTAL).fetchone()
            if self.account.requests is not None and requests + 1 > self.account.requests:
                return None
            if self.account.money is not None and spent + money > self.account.money:
                return None
            row = (input_tokens, output_tokens, money)
            number = database.execute("INSERT INTO open (input, output, money) VALUES (?, ?, ?)", row).lastrowid
            assert number is not None, "an inserted row has a number"
            return number

    def _leave(self, number: int, usage: Mapping[str, int] | None) -> None:
        """Moves an attempt to what is spent; `usage`: what its answer says, None where it cost nothing."""
        with self._transaction() as database:
            worst = database.execute("SELECT input, output FROM open WHERE number = ?", (number,)).fetchone()
            database.execute("DELETE FROM open WHERE number = ?", (number,))
            if usage is not None:
                tokens = usage.get("prompt_tokens", worst[0]), usage.get("completion_tokens", worst[1])
                database.execute(
                    "UPDATE spent SET requests = requests + 1, input = input + ?, output = output + ?, "
                    "money = money + ?",
                    (*tokens, self.account.price(*tokens)),
                )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection that no other process writes beside; commits at the end, or takes all back."""
        database = sqlite3.connect(self.path, timeout=60.0, isolation_level=None)
        try:
            database.execute("PRAGMA synchronous = OFF")  # a killed process loses nothing; only the machine's end would
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            way_out = trouble(error) or (
                "it is damaged: move it away; what was spent before is then not counted, so lower the budget by it"
            )
            raise RemoteError(f"{self.key}: the ledger {self.path} cannot be used ({error}): {way_out}") from error
        finally:
            database.close()

    def _exhausted(self, next_money: float) -> str:
        totals, account = self.totals(), self.account
        limits = {"money": (totals.money, account.money), "requests": (totals.requests, account.requests)}
        spent = ", ".join(f"{name} {now:g} of {most:g}" for name, (now, most) in limits.items() if most is not None)
        return (
            f"{self.key}: budget reached before a request that may cost up to {next_money:g} (spent: {spent}; ledger "
            f"{self.path}). Raise api.account.money or api.account.requests and repeat the same command: the run "
            "continues, and what has been answered is not asked again."
        )


def input_bound(body: Mapping[str, Any]) -> int:
    """No tokenizer that works on bytes makes more tokens of a request: all of its JSON counts, tools and forms too.

    Those are counted as chat templates write them, indented and with an explanation.
    """
    explained = any(name in body for name in EXPLAINED)
    text = json.dumps(body, ensure_ascii=False, indent=4 if explained else None)
    around = REQUEST_TOKENS + MESSAGE_TOKENS * len(body["messages"]) + EXPLAINED_TOKENS * explained
    return around + len(text.encode(errors="surrogatepass"))


def output_limit(body: Mapping[str, Any]) -> int:
    """The most tokens that an answer to the request may have, those of its reasoning included."""
    return int(body["max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"])


def _usage(response: httpx.Response) -> dict[str, int]:
    """The token counts that an answer states; those that it does not are left out."""
    try:
        usage = response.json()["usage"]
        return {
            name: int(usage[name]) for name in ("prompt_tokens", "completion_tokens") if usage.get(name) is not None
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
