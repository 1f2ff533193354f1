from __future__ import annotations

from tests.config.conftest import build, code, env, problems, user_file

__all__ = ["build", "code", "env", "problems", "user_file"]
