"""A worker on a full disk: its prints are lost, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from sunfleck.executor.elastic.outputs import outlive_full_disk
if len(sys.argv) > 1:
    outlive_full_disk()
for name in ("stdout", "stderr"):
    print("x" * 100_000, file=getattr(sys, name), flush=True)
print("flushed at exit")
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize(("args", "succeeds"), [([], False), (["outlive"], True)])
def test_prints_on_a_full_disk_do_not_end_a_worker(args, succeeds):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", SCRIPT, *args], stdout=full, stderr=full, timeout=60, check=False)
    assert (done.returncode == 0) is succeeds


def test_what_can_be_written_is_written_at_once(tmp_path):
    script = SCRIPT.replace('print("flushed at exit")', 'print("last"); import os; os._exit(0)').replace("100_000", "3")
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", script, "outlive"], stdout=log, stderr=log, timeout=60, check=True)
    assert (tmp_path / "log").read_text().split() == ["xxx", "xxx", "last"]
