"""Importing this reads the demo's data. A zygote that has imported it shares the pages with every worker that it forks:
what a worker need not read again it has at once, however small its share of a CPU."""

from __future__ import annotations

from sunfleck.demo.data import read_digits, read_text

read_digits()
read_text()
