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

log = logging.getLogger(__name__)


def content_key(content: Any) -> str:
    """A name for any JSON value, the same in every run."""
    return _digest(json.dumps(content, sort_keys=True, ensure_ascii=False))


class AnswerCache:
    """A mapping from content keys to JSON values that survives restarts; threads, processes and runs may share it.

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
        """The value, None where there is no sound one."""
        try:
            with closing(self._connect()) as database:
                row = database.execute("SELECT value, checksum FROM answers WHERE key = ?", (key,)).fetchone()
        except sqlite3.OperationalError:  # busy for a minute, or a full disk: not a matter of contents
            raise
        except sqlite3.DatabaseError as error:
            row = (str(error), "")
        if row is None:
            return None
        if _digest(f"{key} {row[0]}") != row[1]:
            log.warning("%s: the entry %s is damaged; it is asked for again", self.path, key)
            self.damaged += 1
            return None
        return json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        """Keeps a value; replaces a former one."""
        text = json.dumps(value, ensure_ascii=False)
        with closing(self._connect()) as database, database:
            row = (key, text, _digest(f"{key} {text}"))
            database.execute("INSERT OR REPLACE INTO answers (key, value, checksum) VALUES (?, ?, ?)", row)

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
        except sqlite3.OperationalError:  # busy for a minute, or a full disk: not a matter of contents
            raise
        except sqlite3.DatabaseError as error:
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
