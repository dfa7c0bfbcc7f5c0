"""The msgspec functions for `rows`; each record type is registered here once."""

from __future__ import annotations

from msgspec import ValidationError as ValidationError
from msgspec import convert as convert
from msgspec import json
from msgspec import to_builtins as to_builtins

from safetune.store.records import ChoiceRecord, KeyRecord, RecordedCall, TrialRecord

#: msgspec looks at a type when it is first used, and two threads that do so at once would crash: it
#: is used here, where the module's import lock keeps the others out.
for _kind in (KeyRecord, TrialRecord, ChoiceRecord, RecordedCall):
    json.Decoder(_kind)
