"""All launchers, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gristmill.base.errors import Exit, UserError
from gristmill.config.launch import LauncherName
from gristmill.launch.jobs.batch import Launcher
from gristmill.launch.jobs.kubernetes import Kubernetes
from gristmill.launch.jobs.mpi import Mpi
from gristmill.launch.jobs.pbs import Pbs
from gristmill.launch.jobs.ray import Ray
from gristmill.launch.jobs.slurm import Slurm

LAUNCHERS: Mapping[LauncherName, Callable[[], Launcher]] = {
    "slurm": Slurm,
    "pbs": Pbs,
    "mpi": Mpi,
    "kubernetes": Kubernetes,
    "ray": Ray,
}


def launcher_of(name: str | None) -> tuple[LauncherName, Launcher]:
    """The launcher with this name."""
    for known, make in LAUNCHERS.items():
        if known == name:
            return known, make()
    what = "nothing says where to submit the run" if name is None else f"there is no {name!r}"
    raise UserError(
        what,
        where="--on",
        remedy=f"give --on or set launch.on to one of: {', '.join(LAUNCHERS)}",
        exit=Exit.USAGE,
    )
