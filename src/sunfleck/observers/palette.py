"""PURE. Colours of jobs, the same on the terminal and in the report.

Okabe and Ito's set (jfly.uni-koeln.de/color), chosen to be told apart with any kind of colour vision; its yellow is
left out because it vanishes on white. Colour never carries meaning alone: the job's id or name is always there too.
"""

from __future__ import annotations

from collections.abc import Iterable

JOB_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F6BB3")
IDLE_COLOUR = "#9AA0A6"


def job_colours(jobs: Iterable[str]) -> dict[str, str]:
    """Colour of each job, by order of arrival; used again from the start when they run out."""
    return {job: JOB_COLOURS[i % len(JOB_COLOURS)] for i, job in enumerate(jobs)}


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on `colour` (#rrggbb); weights of ITU-R BT.601."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
