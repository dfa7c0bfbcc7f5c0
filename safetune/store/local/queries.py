"""The SQL that the store reads and deletes with, built once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from safetune.store.local.rows import CHOICE, KEY, TRIAL
from safetune.store.local.table import Scalar, text

if TYPE_CHECKING:
    import sqlite3

_NEWEST_FIRST = "ORDER BY choice.generation DESC, choice.created DESC"
CHOICES_OF_KEY = f"{CHOICE.select} WHERE key = ? {_NEWEST_FIRST}"
CHOICES_OF_LIST = f"{CHOICE.select} WHERE key = ? AND declared = ? ORDER BY generation DESC"
CHOICE_OF_GENERATION = f"{CHOICE.select} WHERE key = ? AND declared = ? AND generation = ?"
TRIALS_OF_KEY = f"{TRIAL.select} WHERE key = ? ORDER BY generation, rowid"
TRIALS_OF_GENERATION = f"{TRIAL.select} WHERE key = ? AND generation = ? ORDER BY rowid"

_OF_NAME = "JOIN key ON key.digest = {0}.key WHERE ? IS NULL OR key.name = ?"
KEYS = f"{KEY.select} WHERE ? IS NULL OR name = ? ORDER BY name, rowid"
CHOICES = f"{CHOICE.select} {_OF_NAME.format('choice')} {_NEWEST_FIRST}"
TRIALS = f"{TRIAL.select} {_OF_NAME.format('trial')} ORDER BY trial.rowid"
_KIN = "key.kernel = ? AND key.device = ?"
KIN_KEYS = f"{KEY.select} WHERE {_KIN} ORDER BY rowid"
KIN_CHOICES = f"{CHOICE.select} JOIN key ON key.digest = choice.key WHERE {_KIN} {_NEWEST_FIRST}"
KERNEL_NAMES = "SELECT DISTINCT name FROM key ORDER BY name"

#: Each key that anything is stored of: digest, newest row, number of rows, toolchain.
AGES = (
    "SELECT known.digest, max(created), count(created), key.toolchain FROM ("
    "SELECT digest, NULL AS created FROM key UNION ALL SELECT key, created FROM trial "
    "UNION ALL SELECT key, created FROM choice UNION ALL SELECT key, created FROM call) AS known "
    "LEFT JOIN key ON key.digest = known.digest GROUP BY known.digest ORDER BY 2, 1"
)

CLEAR = (
    "DELETE FROM trial WHERE key IN (SELECT digest FROM key WHERE name = ?)",
    "DELETE FROM choice WHERE key IN (SELECT digest FROM key WHERE name = ?)",
    "DELETE FROM call WHERE name = ?",
)
CLEAR_KEYS = "DELETE FROM key WHERE name = ?"
CLEAR_UNUSED = (
    "DELETE FROM kernel WHERE digest NOT IN (SELECT kernel FROM key)",
    "DELETE FROM device WHERE digest NOT IN (SELECT device FROM key)",
)


def fetch(
    connection: sqlite3.Connection, statement: str, *parameters: Scalar
) -> list[Sequence[Any]]:
    """All rows at once: a half-read SELECT would pin an old snapshot and block a COMMIT."""
    return connection.execute(statement, parameters).fetchall()


def name_twice(kernel_name: str | None) -> tuple[str | None, str | None]:
    """Return what fills `WHERE ? IS NULL OR name = ?`."""
    name = None if kernel_name is None else text(kernel_name)
    return name, name
