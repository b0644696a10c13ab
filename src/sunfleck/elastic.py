"""What a training script imports: `run = sunfleck.elastic.init()`. See docs/elastic.md."""

from __future__ import annotations

from sunfleck.executor.elastic.trainer import InvalidRequest, Run, init

__all__ = ["InvalidRequest", "Run", "init"]
