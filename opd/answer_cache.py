"""Answers that have been paid for, on disk, keyed by what was asked."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from opd.remote import RemoteError

log = logging.getLogger(__name__)


def content_key(content: Any) -> str:
    """A name for any JSON value, the same in every run."""
    return _digest(json.dumps(content, sort_keys=True, ensure_ascii=False))


TROUBLES = {  # of SQLite's messages (sqlite3_errstr): those that say nothing of the file's contents
    "locked": "another process has held it for a minute; end that one, and repeat the same command",
    "disk is full": "make room on its disk, and repeat the same command",
    "unable to open": "its folder must exist and be open to this user; then repeat the same command",
    "readonly": "make it writable for this user, and repeat the same command",
    "disk i/o": "its disk fails, or a quota is reached; mend that, and repeat the same command",
}


def trouble(error: sqlite3.Error) -> str | None:
    """What to do where a database cannot be used although it is sound; None where the file may be damaged."""
    said = str(error).lower()
    return next((way_out for words, way_out in TROUBLES.items() if words in said), None)


class AnswerCache:
    """A mapping from content keys to JSON values that survives restarts; threads, processes and runs may share it.

    Keys say what was asked of which model name, not at which address: nothing is paid twice when a server moves to
    another port. So within one folder a model name stands for one model; serve other weights under another name
    (vLLM: --served-model-name), or give them another folder.

    Every entry carries a checksum: one that has been damaged counts as absent, so it is asked for again. A file that is
    damaged as a database is moved aside when it is opened, and what is sound in it taken over.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "answers.sqlite"
        self.damaged = 0  # entries found so
        if (damage := self._create()) is not None:
            aside = self.path.with_suffix(".damaged")
            log.warning("%s is damaged (%s); moved to %s", self.path, damage, aside)
            os.replace(self.path, aside)
            self.damaged += 1
            self._create()
            self._take_over(aside)

    def get(self, key: str) -> Any:
        """The value, None where there is no sound one.

        Raises:
            RemoteError: the file cannot be used, for a reason other than damage.
        """
        try:
            with closing(self._connect()) as database:
                row = database.execute("SELECT value, checksum FROM answers WHERE key = ?", (key,)).fetchone()
        except sqlite3.DatabaseError as error:
            if trouble(error):  # a miss would be paid for again
                raise self._unusable(error) from error
            row = (str(error), "")
        if row is None:
            return None
        if _digest(f"{key} {row[0]}") != row[1]:
            log.warning("%s: the entry %s is damaged; it is asked for again", self.path, key)
            self.damaged += 1
            return None
        return json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        """Keeps a value; replaces a former one.

        Raises:
            RemoteError: it cannot be written.
        """
        text = json.dumps(value, ensure_ascii=False)
        try:
            with closing(self._connect()) as database, database:
                row = (key, text, _digest(f"{key} {text}"))
                database.execute("INSERT OR REPLACE INTO answers (key, value, checksum) VALUES (?, ?, ?)", row)
        except sqlite3.DatabaseError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: sqlite3.Error) -> RemoteError:
        way_out = trouble(error) or "repeat the same command: what is damaged is then moved aside"
        return RemoteError(f"the kept answers {self.path} cannot be used ({error}): {way_out}")

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=60.0)
        database.execute("PRAGMA synchronous = OFF")  # a killed process loses nothing; the machine's end may damage it
        return database

    def _create(self) -> str | None:
        """Makes the table where there is none; what is wrong with the file, None for nothing."""
        try:
            with closing(self._connect()) as database, database:
                database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT, checksum TEXT)")
                found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            if trouble(error):
                raise self._unusable(error) from error
            return str(error)
        return None if found == "ok" else str(found)

    def _take_over(self, damaged: Path) -> None:
        """Keeps the sound entries of a damaged file, as far as it can be read from either end."""
        with closing(sqlite3.connect(damaged)) as source:
            for order in ("ASC", "DESC"):
                try:
                    rows = source.execute(f"SELECT key, value, checksum FROM answers ORDER BY rowid {order}")
                    for key, text, checksum in rows:
                        if _digest(f"{key} {text}") == checksum:
                            self.put(key, json.loads(text))
                except sqlite3.DatabaseError as error:
                    log.warning("%s: unreadable from some place on (%s)", damaged, error)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
