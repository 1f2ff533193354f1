"""Freeze the garbage collector. The fork server imports this module last, so that no rank scans the objects before it.

A scan would copy each of their pages into each rank.
"""

from __future__ import annotations

import gc

gc.freeze()
