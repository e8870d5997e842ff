"""A process that was started by a supervisor does not outlive it, however the supervisor ends.

The Linux kernel kills the process when the supervisor is gone; on other systems a thread checks the
parent every second. Nothing is saved: whatever killed the supervisor would not wait for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

SUPERVISOR = "GRISTMILL_SUPERVISOR"
"""The variable with the supervisor's process id."""
_PR_SET_PDEATHSIG = 1


def follow_supervisor() -> bool:
    """End this process when the supervisor that started it ends; False if there is none."""
    text = os.environ.pop(SUPERVISOR, None)
    if text is None:
        return False
    supervisor = int(text)
    set_by_kernel = sys.platform == "linux" and (
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0
    )
    if not set_by_kernel:
        threading.Thread(target=_watch_parent, args=(supervisor,), daemon=True).start()
    # It may have ended before the kernel was told.
    if os.getppid() != supervisor:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def _watch_parent(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
