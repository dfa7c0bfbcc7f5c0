"""Connects to a PostgreSQL server, and recognises one that cannot answer now.

If the server has no free connection or is starting, the caller asks again later. If it does not
answer, this module retries for a while, because it may be restarting. A refusal is final: another
wrong password may lock the account.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from safetune.store.local.db_files import tries

#: For what neither the URL nor a PG* variable sets: notice within seconds that a server is gone.
_DEFAULTS = {"connect_timeout": "2", "fallback_application_name": "safetune"}
_DEFAULTS |= {"keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "2"}
_DEFAULTS |= {"tcp_user_timeout": "5000"}

#: What a server says that has no free connection (53300), or that does not accept any yet (57P03),
#: and what PgBouncer and other poolers say then. psycopg does not pass on the code of an error that
#: ends the connecting, and poolers give it another one.
_LATER = re.compile(
    "too many|remaining connection slots|no more connections|connections exceeded|max clients|"
    "query_wait_timeout|statement timeout|starting up|shutting down|in recovery mode|"
    "not yet accepting",
    re.IGNORECASE,
)

#: How long to try to connect where nothing answers.
CONNECT_FOR_S = 1.6
_PAUSES_S = (0.1, 0.3)


def connect(
    url: str, for_s: float = CONNECT_FOR_S, clock: Callable[[], float] = time.monotonic
) -> psycopg.Connection[Any]:
    """Connect; if nothing answers, retry for `for_s` seconds."""
    given = {*conninfo_to_dict(url)}
    # What a PG* variable or a service file sets.
    given |= {o.keyword.decode() for o in Conninfo.get_defaults() if o.val != o.compiled}
    options: dict[str, Any] = {n: v for n, v in _DEFAULTS.items() if n not in given}
    options["client_encoding"] = "UTF8"  # also if the database has none, as under LANG=C
    for last in tries(for_s, *_PAUSES_S, clock):
        try:
            # No prepared statements: a pooler may give each transaction another server process.
            return psycopg.connect(url, autocommit=True, prepare_threshold=None, **options)
        except psycopg.OperationalError as error:
            if last or _was_answered(error):
                raise
    raise AssertionError("the last try returns or raises")


def is_for_now(error: BaseException) -> bool:
    """Whether a server says that it cannot answer now but may do so later."""
    return isinstance(error, psycopg.OperationalError) and _LATER.search(str(error)) is not None


def _was_answered(error: psycopg.OperationalError) -> bool:
    asked = error.pgconn is not None and (error.pgconn.used_password or error.pgconn.needs_password)
    return asked or "FATAL" in str(error) or is_for_now(error)
