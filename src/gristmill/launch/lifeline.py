"""A process that was started by a supervisor does not outlive it, however the supervisor ends.

The supervisor puts its process id into a variable. `follow_supervisor` makes the Linux kernel kill
this process when the supervisor is gone; on other systems a thread checks the parent every second.
Nothing is saved: whatever killed the supervisor would not wait for a save either, and a process
that tried might wait for its peers for ever.
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
    if not _killed_with_parent():
        threading.Thread(target=_look, args=(supervisor,), daemon=True).start()
    # It may have ended before the kernel was told.
    if os.getppid() != supervisor:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def _killed_with_parent() -> bool:
    """Tell the kernel to kill this process with its parent; False if the system cannot."""
    if sys.platform != "linux":
        return False
    answer = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return bool(answer == 0)


def _look(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
