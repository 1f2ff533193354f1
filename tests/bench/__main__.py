"""Every benchmark, one after the other."""

from __future__ import annotations

from tests.bench import command_line, notice_to_checkpoint

if __name__ == "__main__":
    command_line.main()
    notice_to_checkpoint.main()
