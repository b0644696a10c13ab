"""What a training script imports: `run = sunfleck.elastic.init()`. See docs/elastic.md."""

from __future__ import annotations

from sunfleck.core.errors import InvalidRequest, SunfleckError
from sunfleck.executor.elastic.trainer import Run, init

__all__ = ["InvalidRequest", "Run", "SunfleckError", "init"]
