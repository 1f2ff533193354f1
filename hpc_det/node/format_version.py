"""The format version of files that outlive the process that wrote them.

A JSON object contains it as the key "hpc_det_format". A file of lines contains it in its first line, and in every line
of a version above 1, because processes of several versions append to the same file. A folder that is committed as a
whole, such as a checkpoint, contains it in its manifest. Files without the key, such as those of hpc_det before this
rule, and files with a JSON list, have version 1. Texts, logs and pickles have none.

A number is raised only when an older hpc_det would misread the file. A new key with a default needs no new number:
readers ignore keys that they do not know, and use the default if a key is missing. An older hpc_det refuses a newer
file with one sentence (`json_files.NewerFormat`); a newer one reads all older files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

KEY = "hpc_det_format"
_RAISED: Mapping[str, int] = {}
"""The format versions above 1, by a pattern of the path as PurePath.match takes it, such as "plan.json" or
"trials/*/journal.jsonl".
"""


def newest_format(file: object) -> int:
    """Return the newest format version of a file that this hpc_det knows, which is the one that it writes.

    `file`: its path, or the last parts of it, such as its name.
    """
    path = PurePath(str(file))
    return next((number for pattern, number in _RAISED.items() if path.match(pattern)), 1)


def with_format(record: Mapping[str, Any], file: object) -> dict[str, Any]:
    """Return the object for the file, with the format version as the first key."""
    return {KEY: newest_format(file), **record}
