"""The functions of `determined.util` that trials and scripts use."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from hpc_det.compat.aliases import missing

__all__ = ["download_gcs_blob_with_backoff", "merge_dicts"]


def merge_dicts(base_dict: Mapping[Any, Any], source_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of `base_dict` with the values of `source_dict`; maps in both are merged."""
    merged = deepcopy(dict(base_dict))
    for key, value in source_dict.items():
        merged[key] = merge_dicts(merged[key], value) if key in merged and isinstance(value, dict) else value
    return merged


def download_gcs_blob_with_backoff(blob: Any, n_retries: int = 32, max_backoff: int = 32) -> Any:
    """Return the content of a blob of Google Cloud Storage; wait up to `max_backoff` seconds between attempts.

    Raises the last error after `n_retries` attempts.
    """
    for attempt in range(n_retries):
        try:
            return blob.download_as_string()
        except Exception:
            if attempt + 1 == n_retries:
                raise
            time.sleep(min(2**attempt + random.random(), max_backoff))
    return None


def __getattr__(name: str) -> Any:
    raise AttributeError(missing(f"{__name__}.{name}"))
