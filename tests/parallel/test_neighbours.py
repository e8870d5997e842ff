"""Seeing whether processes of this machine have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from gristmill.parallel.neighbours import has_ended, home

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="others have no neighbours")


def test_processes_end() -> None:
    assert home() and home() == home()
    assert not has_ended(os.getpid())
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(process.pid)
    process.kill()
    while not has_ended(process.pid):
        time.sleep(0.01)
    assert process.returncode is None, "it is seen before its parent has noticed"
    process.communicate()
    assert has_ended(process.pid)
