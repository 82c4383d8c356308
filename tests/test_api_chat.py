"""Asking a chat API: what is asked, kept, counted, paid and refused; over a real socket."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from opd.answer_cache import AnswerCache
from opd.chat import Chat, Reply, chat_of
from opd.ledger import Account, BudgetSpent, Ledger, Totals, input_bound
from opd.records import Example
from opd.remote import RemoteError
from tests.chat_server import api, chat_server, completion


def echo(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Says what it was asked."""
    return completion(f"re {body['messages'][-1]['content']}")


def ask(*texts: str) -> list[list[dict[str, str]]]:
    """One chat per text."""
    return [[{"role": "user", "content": text}] for text in texts]


def test_answers_come_in_order_and_nothing_is_asked_twice(tmp_path: Path) -> None:
    """Equal chats in one call, in a later call and in another process's client: one request each for a, b and c."""
    with chat_server(echo) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        assert [reply.text for reply in chat.ask(ask("a", "b", "a"))] == ["re a", "re b", "re a"]
        assert [reply.text for reply in chat.ask(ask("b", "c"))] == ["re b", "re c"]
        chat.close()
        later = Chat("main", "m", api(server.url, tmp_path))
        assert [reply.text for reply in later.ask(ask("c", "a"))] == ["re c", "re a"]
        later.close()
    assert sorted(server.texts) == ["a", "b", "c"]


def test_the_cache_may_be_shared_while_each_run_has_its_own_ledger(tmp_path: Path) -> None:
    with chat_server(echo) as server:
        for run in ("one", "two"):
            shared = {"cache": str(tmp_path / "shared")}
            chat = Chat("main", "m", api(server.url, tmp_path / run, account=shared))
            assert chat.ask(ask("a")) == [Reply("re a", "usable")]
            assert chat.ledger.totals().requests == (1 if run == "one" else 0)
            chat.close()
    assert server.texts == ["a"]


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"max_tokens": 21}, {"extra": {"seed": 1}}])
def test_another_question_is_another_entry(change: dict[str, Any], tmp_path: Path) -> None:
    with chat_server(echo) as server:
        for settings in ({}, change):
            chat = Chat("main", "m", api(server.url, tmp_path, **settings))
            chat.ask(ask("a"))
            chat.close()
        assert len(server.bodies) == 2


def test_draws_of_one_chat_are_different_answers(tmp_path: Path) -> None:
    with chat_server(lambda body, number: completion(str(number))) as server:
        chat = Chat("main", "m", api(server.url, tmp_path, remote={"concurrency": 1}))
        assert [reply.text for reply in chat.ask(ask("a", "a", "a"), [0, 1, 0])] == ["0", "1", "0"]
        chat.close()


def test_the_body_is_an_openai_request(tmp_path: Path) -> None:
    with chat_server(echo) as server:
        config = api(server.url, tmp_path, limit_key="max_completion_tokens", temperature=None, extra={"seed": 3})
        chat = Chat("main", "m", config)
        chat.ask([chat_of(Example("a"), system="be brief")])
        chat.close()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    assert server.bodies == [{"model": "m", "messages": messages, "max_completion_tokens": 20, "seed": 3}]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (completion("four"), "usable"),
        (completion(""), "empty"),
        (completion(None), "empty"),
        (completion(" \n"), "empty"),
        (completion("I'm sorry, but I can't help with that."), "refused"),
        (completion("I cannot answer this."), "refused"),
        (completion("**As an AI**, I have no view."), "refused"),
        (completion("I can tell you: 4"), "usable"),
        (completion("", refusal="This is not allowed."), "refused"),
        (completion("fo", finish="content_filter"), "refused"),
        (completion("fo", finish="tool_calls"), "refused"),
        (completion("fo", finish="length"), "cut"),
    ],
)
def test_every_answer_has_a_kind(answer: dict[str, Any], kind: str, tmp_path: Path) -> None:
    with chat_server(lambda body, number: answer) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        (reply,) = chat.ask(ask("2+2"))
        (again,) = chat.ask(ask("2+2"))  # also what cannot be used has been paid for
        metrics = chat.metrics()
        chat.close()
    assert reply.kind == again.kind == kind
    assert len(server.bodies) == 1
    assert metrics[kind].value == 1.0 and metrics["asked"].value == 0.5


def test_half_a_character_in_an_answer_is_replaced(tmp_path: Path) -> None:
    with chat_server(lambda body, number: completion("a\ud83d")) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        assert chat.ask(ask("x")) == [Reply("a?", "usable")]
        chat.close()
        assert len(server.bodies) == 1


# ------------------------------------------------------------------------------------------------------ ledger, budget


def test_the_ledger_holds_what_answers_state(tmp_path: Path) -> None:
    """Two answers of 10 tokens in and 5 out at 3 and 8 per million: 2 (10 * 3 + 5 * 8) / 1e6 = 140e-6."""
    with chat_server(echo) as server:
        prices = {"input_price": 3.0, "output_price": 8.0}
        chat = Chat("main", "m", api(server.url, tmp_path, account=prices))
        chat.ask(ask("a", "b"))
        totals = chat.ledger.totals()
        chat.close()
    assert totals == Totals(2, 20, 10, pytest.approx(140e-6))


def test_without_usage_an_answer_counts_at_its_largest_cost(tmp_path: Path) -> None:
    """The request's bytes, + 16 for the message and 64 for the request; out: max_tokens = 20."""
    request = '{"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 20, "temperature": 1.0}'
    with chat_server(lambda body, number: {"choices": completion("x")["choices"]}) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        chat.ask(ask("abc"))
        assert chat.ledger.totals() == Totals(1, 64 + 16 + len(request), 20, 0.0)
        chat.close()


def test_a_budget_of_requests_stops_before_the_next(tmp_path: Path) -> None:
    """Three may be asked. The first three answers are kept, and the higher limit pays for the fourth alone."""
    with chat_server(echo) as server:
        chat = Chat("main", "m", api(server.url, tmp_path, account={"requests": 3}))
        with pytest.raises(BudgetSpent, match=r"main: budget reached .*requests 3 of 3.*Raise api\.account"):
            chat.ask(ask("a", "b", "c", "d"))
        assert len(server.bodies) == 3
        chat = Chat("main", "m", api(server.url, tmp_path, account={"requests": 4}))
        assert [reply.text for reply in chat.ask(ask("a", "b", "c", "d"))] == ["re a", "re b", "re c", "re d"]
        chat.close()
        assert len(server.bodies) == 4


def test_a_budget_of_money_is_never_exceeded(tmp_path: Path) -> None:
    """Every request may cost 20 tokens out at 1e6 per million = 20, and costs 5; input is free.

    Of 43, requests go out while what is spent + 20 <= 43: after 0, 5, 10, 15 and 20 (the fifth makes it 25, and 45 is
    too much). So five are sent, one after the other or side by side, and 25 is spent.
    """
    with chat_server(echo) as server:
        account = {"output_price": 1e6, "money": 43.0}
        chat = Chat("main", "m", api(server.url, tmp_path, account=account))
        with pytest.raises(BudgetSpent, match=r"may cost up to 20 .*money 25 of 43"):
            chat.ask(ask(*"abcdefghij"))
        assert len(server.bodies) == 5
        assert chat.ledger.totals().money == 25.0


def test_several_processes_share_a_budget(tmp_path: Path) -> None:
    """Eight threads with a ledger of their own each, as processes have, 10 requests each: 25 of 80 are let through."""
    let_through = []

    def spend() -> None:
        ledger = Ledger("x", Account(str(tmp_path), requests=25))
        for _ in range(10):
            try:
                let_through.append(ledger.before({"messages": [], "max_tokens": 1}))
            except BudgetSpent:
                return
            ledger._under_way -= 1  # as if another process had sent it

    threads = [threading.Thread(target=spend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(let_through) == len(set(let_through)) == 25


def test_the_input_bound_counts_bytes() -> None:
    """Two messages, one of them an emoji of 4 bytes: 64 + 2 * 16 + the bytes of the JSON."""
    body = {"messages": [{"content": "a"}, {"content": "\U0001f600"}], "seed": 3}
    text = '{"messages": [{"content": "a"}, {"content": "????"}], "seed": 3}'
    assert input_bound(body) == 64 + 2 * 16 + len(text)


@pytest.mark.parametrize("name", ["tools", "response_format"])
def test_the_input_bound_counts_what_a_chat_template_explains(name: str) -> None:
    """A description of 500 bytes, and 1024 for the words around it."""
    plain: dict[str, Any] = {"messages": [{"content": "a"}]}
    assert input_bound({**plain, name: [{"description": "x" * 500}]}) > input_bound(plain) + 1024 + 500


def body_of(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


@pytest.mark.parametrize("outcome", [None, httpx.DecodingError("not gzip"), httpx.ReadTimeout("late")])
def test_an_attempt_of_which_nobody_knows_what_came_stays_at_its_largest_cost(outcome: Any, tmp_path: Path) -> None:
    ledger = Ledger("x", Account(str(tmp_path)))
    ledger.after(ledger.before(body_of("a")), outcome)
    assert ledger.totals() == Totals(1, input_bound(body_of("a")), 1, 0.0)


def test_an_attempt_that_was_not_sent_costs_nothing(tmp_path: Path) -> None:
    ledger = Ledger("x", Account(str(tmp_path)))
    ledger.after(ledger.before(body_of("a")), httpx.ConnectError("refused"))
    assert ledger.totals().requests == 0


def test_a_ledger_that_cannot_be_written_leaves_nobody_waiting(tmp_path: Path) -> None:
    """One request fits. While it is under way another waits for it; its end cannot be noted, and both are told."""
    ledger = Ledger("x", Account(str(tmp_path), requests=1))
    number = ledger.before(body_of("a"))
    ended: list[type[Exception]] = []

    def wait() -> None:
        try:
            ledger.before(body_of("b"))
        except RemoteError as error:
            ended.append(type(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    sound = ledger.path.read_bytes()
    ledger.path.write_bytes(b"\0 nonsense" * 1000)
    with pytest.raises(RemoteError, match="it is damaged"):
        ledger.after(number, None)
    waiting.join(30)
    assert not waiting.is_alive() and len(ended) == 1
    ledger.path.write_bytes(sound)
    assert ledger._under_way == 0


class Busy(sqlite3.Connection):
    """A database that another process has locked."""

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        raise sqlite3.OperationalError("database is locked")


class Full(sqlite3.Connection):
    """A database on a full disk: it can be read."""

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        if arguments[0].startswith(("INSERT", "COMMIT")):
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(*arguments)


def connecting(monkeypatch: pytest.MonkeyPatch, kind: type[sqlite3.Connection]) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **named: connect(*a, **named, factory=kind))


@pytest.mark.parametrize(
    ("kind", "says"), [(Busy, r"another process has held it for a minute"), (Full, r"make room on its disk")]
)
def test_a_busy_or_full_database_is_not_called_damaged(
    kind: type[sqlite3.Connection], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, cache = Ledger("main", Account(str(tmp_path))), AnswerCache(tmp_path)
    cache.put("k", 1)
    connecting(monkeypatch, kind)
    with pytest.raises(RemoteError, match=rf"main: the ledger .*{says}") as caught:
        ledger.before(body_of("a"))
    assert "damaged" not in str(caught.value)
    with pytest.raises(RemoteError, match=rf"the kept answers .*{says}"):
        cache.put("k", 2)
    monkeypatch.undo()
    assert cache.get("k") == 1 and cache.damaged == 0


def test_a_busy_cache_is_no_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be paid for again."""
    cache = AnswerCache(tmp_path)
    cache.put("k", 1)
    connecting(monkeypatch, Busy)
    for use in (lambda: cache.get("k"), lambda: AnswerCache(tmp_path)):
        with pytest.raises(RemoteError, match="another process"):
            use()


def test_an_entry_that_is_no_text_is_a_miss(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    cache.put("k", 1)
    with sqlite3.connect(cache.path) as database:
        database.execute("UPDATE answers SET value = CAST(x'ff' AS TEXT)")
    assert cache.get("k") is None and cache.damaged == 1


def test_a_server_that_moves_is_not_paid_again(tmp_path: Path) -> None:
    for _ in range(2):
        with chat_server(echo) as server:
            chat = Chat("main", "m", api(server.url, tmp_path))
            assert chat.ask(ask("a")) == [Reply("re a", "usable")]
            assert chat.ledger.totals().requests == 1
            chat.close()


@pytest.mark.parametrize(
    ("account", "says"),
    [
        ({"money": 5.0}, "without prices nothing would ever be spent"),
        ({"money": -1.0, "input_price": 1.0}, "money=-1"),
        ({"output_price": float("nan")}, "output_price=nan"),
    ],
)
def test_an_account_that_makes_no_sense(account: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Account("x", **account)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature"),
        ({"extra": {"n": 2}}, r"extra\.n"),
        ({"refusal": "("}, "refusal"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        api("http://x", tmp_path, **settings)


# ----------------------------------------------------------------------------------------------------- damaged cache


def test_a_damaged_entry_is_asked_for_again(tmp_path: Path) -> None:
    with chat_server(echo) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        chat.ask(ask("a", "b"))
        with sqlite3.connect(tmp_path / "answers.sqlite") as database:
            changed = database.execute("UPDATE answers SET value = replace(value, 're a', 're z')").rowcount
        assert changed == 2
        assert [reply.text for reply in chat.ask(ask("a", "b"))] == ["re a", "re b"]
        assert chat.cache.damaged == 1
        assert [reply.text for reply in chat.ask(ask("a", "b"))] == ["re a", "re b"]
        chat.close()
    assert sorted(server.texts) == ["a", "a", "b"]


def test_a_cache_that_is_no_database_is_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "answers.sqlite").write_bytes(b"\0 nonsense" * 1000)
    with chat_server(echo) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        assert chat.ask(ask("a")) == [Reply("re a", "usable")]
        chat.close()
    assert (tmp_path / "answers.damaged").read_bytes().startswith(b"\0 nonsense")


@pytest.mark.parametrize("at", [0.2, 0.5, 0.8])
def test_overwritten_pages_lose_no_sound_answer_and_give_no_wrong_one(at: float, tmp_path: Path) -> None:
    """Four of the file's pages are overwritten: every answer that comes is the right one, and most are still known.

    An answer and its key take over 350 bytes, so at most 4 * 4096 / 350 + 2 = 48 of 60 lie on those pages.
    """
    texts = [f"{number} " + "x" * 300 for number in range(60)]
    with chat_server(echo) as server:
        chat = Chat("main", "m", api(server.url, tmp_path))
        chat.ask(ask(*texts))
        chat.close()
        content = bytearray((tmp_path / "answers.sqlite").read_bytes())
        start = int(len(content) * at) // 4096 * 4096
        content[start : start + 4 * 4096] = b"\xff" * (4 * 4096)
        (tmp_path / "answers.sqlite").write_bytes(content)
        chat = Chat("main", "m", api(server.url, tmp_path))
        assert [reply.text for reply in chat.ask(ask(*texts))] == [f"re {text}" for text in texts]
        chat.close()
        assert 60 < len(server.bodies) <= 60 + 48


# ------------------------------------------------------------------------------------------------------------ secrets


def test_the_key_comes_from_the_environment_and_shows_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPD_TEST_KEY", "sk-secret\n")
    with chat_server(echo) as server:
        config = api(server.url, tmp_path)
        chat = Chat("main", "m", config)
        chat.ask(ask("a"))
        chat.close()
    assert server.keys == ["Bearer sk-secret"]
    assert "sk-secret" not in repr(config) + repr(chat.__dict__) + caplog.text
    for file in tmp_path.iterdir():
        assert b"sk-secret" not in file.read_bytes()


def test_a_damaged_ledger_ends_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"\0 nonsense" * 1000)
    with pytest.raises(RemoteError, match=r"main: the ledger .*ledger\.sqlite cannot be used"):
        Ledger("main", Account(str(tmp_path), requests=5))
