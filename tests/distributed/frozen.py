"""The last that the fork server imports: what is there by then stays, and no rank looks through it for garbage.

That would be a copy of each page of it, too, in each rank.
"""

from __future__ import annotations

import gc

gc.freeze()
