"""Which process of the run this is: read once from the variables of the launcher.

The tables below name the variables of torchrun, Open MPI, MPICH with Cray's PALS, and Slurm's srun,
in this order. The first launcher whose variables are set counts, since one may run inside another:
torchrun in a step of srun, mpiexec in a PBS job. A job without a launcher is one process: PBS sets
no ranks, and what Slurm sets for a batch script describes tasks that have not been started.

The rendezvous is at MASTER_ADDR and MASTER_PORT. If these are not set, it is at the job's first
host, with a port derived from the job's id, so that all processes find the same address.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from gristmill.base.errors import UserError
from gristmill.base.limits import core_limit

Values = Mapping[str, str]

_PORTS = range(15000, 30000)
"""Below those that systems use for outgoing connections."""
JOB_BEGAN = "GRISTMILL_JOB_BEGAN"
"""The variable with the time, in seconds since 1970, at which the job around a process began whose
time is limited; set by the scripts of `gristmill launch`."""
_DEFAULT_PORT = 29500
"""For a job without an id; torch's own default."""


def process_began() -> float:
    """When this process began, in seconds since 1970; where the system does not tell, now."""
    now = time.time()
    try:
        # The second field is the program's name, which may contain anything.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return now
    return min(now, now - up + ticks / os.sysconf("SC_CLK_TCK"))


def job_began(*, of_scheduler: bool = False) -> float | None:
    """When the job around this process began, in seconds since 1970; None without a job whose
    script says so, or `of_scheduler`, whose Slurm does."""
    for name in (JOB_BEGAN, *(["SLURM_JOB_START_TIME"] if of_scheduler else [])):
        began = os.environ.get(name, "")
        if began.isdigit():
            return float(began)
    return None


class Address(NamedTuple):
    """Where the processes of a run find each other."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class ProcessInfo:
    """The rank of this process, its rank on its node, and the number of processes."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    host: str = "localhost"
    local_world: int | None = 1
    """Processes on this node; None if not known."""
    nodes: int | None = 1
    """Nodes of the run; None if not known."""
    address: Address | None = None
    """The rendezvous; None if not known."""
    agent: bool = False
    """Whether the launcher hosts the store there, and not rank 0."""
    attempt: int = 0
    """How often the launcher has restarted all processes at the same address."""

    @classmethod
    def current(cls, environment: Values | None = None) -> ProcessInfo:
        """Read the variables of the launcher; without them this is a single process."""
        given = os.environ if environment is None else environment
        values = {name: value for name, value in given.items() if value.strip()}
        launcher = next((known for known in _LAUNCHERS if known.present(values)), None)
        own = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & values.keys()
        if own - {"WORLD_SIZE"} or (own and launcher is None):
            return _from_torchrun(values, launcher)
        if launcher is None:
            return cls(host=socket.gethostname())
        return _from_launcher(values, launcher)


@dataclass(frozen=True)
class _LauncherVariables:
    """The variables of one launcher; of several names for a number, the first that is set."""

    rank: tuple[str, ...]
    local_rank: tuple[str, ...]
    world: tuple[str, ...]
    local_world: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    """Ids of the job."""

    def present(self, values: Values) -> bool:
        """Whether this launcher has started the process."""
        if self is _SLURM:
            # Steps of sbatch and salloc, without tasks, have names, or numbers from the top down.
            step = values.get("SLURM_STEP_ID", values.get("SLURM_STEPID", "batch"))
            if not step.isdigit() or int(step) >= 0xFFFFFFF0:
                return False
        return any(name in values for name in self.rank)


_TORCHRUN = _LauncherVariables(
    rank=("RANK",),
    local_rank=("LOCAL_RANK",),
    world=("WORLD_SIZE",),
    local_world=("LOCAL_WORLD_SIZE",),
    nodes=("GROUP_WORLD_SIZE",),
)
_OPEN_MPI = _LauncherVariables(
    rank=("OMPI_COMM_WORLD_RANK",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    world=("OMPI_COMM_WORLD_SIZE",),
    local_world=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_PMI = _LauncherVariables(
    rank=("PMI_RANK", "PALS_RANKID"),
    local_rank=("PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
    world=("PMI_SIZE",),
    local_world=("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    job=("PALS_APID", "PMI_JOBID"),
)
_SLURM = _LauncherVariables(
    rank=("SLURM_PROCID",),
    local_rank=("SLURM_LOCALID",),
    world=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_world=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
)
_LAUNCHERS = (_OPEN_MPI, _PMI, _SLURM)


def _from_torchrun(values: Values, outer: _LauncherVariables | None) -> ProcessInfo:
    """RANK and WORLD_SIZE, with LOCAL_RANK or something that stands for it."""
    only_local_missing = {"RANK", "WORLD_SIZE"} <= values.keys() and "LOCAL_RANK" not in values
    if only_local_missing and outer is not None:
        # Set by a script inside a launcher, which knows the rank on the node.
        place = _from_launcher(values, outer)
        _require_equal(values, "RANK", _name(values, outer.rank))
        return place
    address = None
    if "MASTER_ADDR" in values or "MASTER_PORT" in values:
        _require(values, "MASTER_ADDR", "MASTER_PORT")
        address = Address(values["MASTER_ADDR"], _given_port(values))
    if only_local_missing and address is not None:
        # A PyTorchJob with one process in each pod.
        each = values.get("PET_NPROC_PER_NODE", "1")
        if each.isdigit() and int(each) > 1:
            raise _wrong(
                f"PET_NPROC_PER_NODE={each} asks for {each} processes in every pod, but LOCAL_RANK "
                "is not set, which would tell them apart",
                "start with torchrun in the pod, or ask for one process in each pod",
            )
        values = {**values, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return replace(
        _place(values, _TORCHRUN, local=_TORCHRUN),
        address=address,
        agent=values.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(values, ("TORCHELASTIC_RESTART_COUNT",)) or 0,
    )


def _from_launcher(values: Values, launcher: _LauncherVariables) -> ProcessInfo:
    """MPI or Slurm. If one does not set the rank on the node, the next may."""
    local = launcher
    if _number(values, launcher.local_rank) is None:
        later = _LAUNCHERS[_LAUNCHERS.index(launcher) + 1 :]
        local = next((known for known in later if _agree(values, known, launcher)), launcher)
    _require_equal(values, "WORLD_SIZE", _name(values, launcher.world))
    place = _place(values, launcher, local=local)
    host = values.get("MASTER_ADDR") or _first_host(values, place)
    if host is None:
        return place
    port = _given_port(values) if "MASTER_PORT" in values else _port_of_job(values, launcher)
    return replace(place, address=Address(host, port))


def _agree(values: Values, inner: _LauncherVariables, outer: _LauncherVariables) -> bool:
    return (
        inner.present(values)
        and _number(values, inner.rank) == _number(values, outer.rank)
        and _number(values, inner.world) == _number(values, outer.world)
    )


# ------------------------------------------------------------------ numbers


def _name(values: Values, names: tuple[str, ...]) -> str:
    """The first of the names that is set; the first of all if none is."""
    return next((name for name in names if name in values), names[0])


def _number(values: Values, names: tuple[str, ...]) -> int | None:
    """The number under the first name that is set; None if none is."""
    for name in names:
        if name in values:
            try:
                return int(values[name])
            except ValueError as error:
                raise _wrong(f"{name}={values[name]} is not a whole number") from error
    return None


def _place(
    values: Values, launcher: _LauncherVariables, *, local: _LauncherVariables
) -> ProcessInfo:
    """The numbers of a launcher; those of the node may come from another one around it."""
    names = [
        _name(values, options) for options in (launcher.rank, local.local_rank, launcher.world)
    ]
    remedy = "set RANK, LOCAL_RANK and WORLD_SIZE, as torchrun does"
    _require(values, *names, remedy=remedy + (", or unset them" if launcher is _TORCHRUN else ""))
    _require_equal(values, *launcher.rank)
    _require_equal(values, *local.local_rank)
    rank, local_rank, world = (_number(values, (name,)) or 0 for name in names)
    for name, number in zip(names, (rank, local_rank), strict=False):
        if not 0 <= number < world:
            raise _wrong(f"{name}={number} does not fit {names[2]}={world}")
    here = (_tasks_here if local is _SLURM else _number)(values, local.local_world)
    if here is not None and not local_rank < here <= world:
        raise _wrong(
            f"{names[1]}={local_rank} and {names[2]}={world} do not fit {here} processes on this "
            "node"
        )
    nodes = _number(values, launcher.nodes)
    if nodes is None and here is not None and world % here == 0:
        nodes = world // here
    return ProcessInfo(rank, local_rank, world, socket.gethostname(), local_world=here, nodes=nodes)


def _wrong(what: str, remedy: str | None = None) -> UserError:
    return UserError(what, where="environment", remedy=remedy)


def _require(values: Values, *names: str, remedy: str | None = None) -> None:
    missing = [name for name in names if name not in values]
    if missing:
        given = next(name for name in names if name in values)
        raise _wrong(f"{given} is set but {', '.join(missing)} is not", remedy)


def _require_equal(values: Values, *names: str) -> None:
    """Refuse different numbers under those of the names that are set."""
    first, *rest = [name for name in names if name in values] or [""]
    for name in rest:
        if _number(values, (name,)) != _number(values, (first,)):
            what = f"{first}={values[first]} and {name}={values[name]} contradict each other"
            raise _wrong(what, f"unset {first} if it is left over from another launcher")


def _tasks_here(values: Values, names: tuple[str, ...]) -> int | None:
    """Slurm's tasks on this node: one count for all, or one for each: "2(x3),1" is 2, 2, 2, 1."""
    node = _number(values, ("SLURM_NODEID",)) or 0
    each: list[int] = []
    for part in values.get(_name(values, names), "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        each += [int(match[1])] * int(match[2] or 1) if match else []
    if len(each) == 1:
        each *= _number(values, _SLURM.nodes) or 1
    # The variable may hold what the whole job asked for, which is not always what the step has.
    if sum(each) != _number(values, _SLURM.world):
        return None
    return each[node] if node < len(each) else None


# ------------------------------------------------------------------ the rendezvous


def _given_port(values: Values) -> int:
    port = _number(values, ("MASTER_PORT",))
    if port is None or not 0 < port < 65536:
        raise _wrong(f"MASTER_PORT={port} is not a port")
    return port


def _first_host(values: Values, place: ProcessInfo) -> str | None:
    """The host of rank 0: launchers fill the hosts of a job in order."""
    if place.local_world == place.world:
        return "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in values:
            hosts = expand_hosts(values[name])
            if not hosts:
                raise _wrong(f"{name}={values[name]} is not a list of hosts")
            return hosts[0]
    if "PBS_NODEFILE" in values:
        try:
            lines = Path(values["PBS_NODEFILE"]).read_text().split()
        except OSError:
            return None
        return lines[0] if lines else None
    return None


def _port_of_job(values: Values, launcher: _LauncherVariables) -> int:
    """A port that all processes of a job derive, and that two jobs are unlikely to share."""
    job = next((values[name] for name in launcher.job if name in values), None)
    if job is None and "SLURM_JOB_ID" in values:
        job = f"{values['SLURM_JOB_ID']}.{values.get('SLURM_STEP_ID', '')}"
    job = job or values.get("PBS_JOBID")
    return _DEFAULT_PORT if job is None else _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def expand_hosts(text: str) -> list[str]:
    """All hosts of a compressed list such as `n[01-04,7],gpu2`; none if it is malformed."""
    hosts: list[str] = []
    # Commas inside brackets separate numbers, those outside separate hosts.
    for pattern in re.split(r",(?![^\[]*\])", text.strip()):
        names = [""]
        for position, part in enumerate(re.split(r"\[([^\[\]]*)\]", pattern)):
            endings = _expand_numbers(part) if position % 2 else [part]
            names = [name + ending for name in names for ending in endings]
        if not names:
            return []
        hosts += names
    return hosts if all(re.fullmatch(r"[\w.\-]+", host) for host in hosts) else []


def _expand_numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if ends is None:
            return []
        first, last = ends[1], ends[2] or ends[1]
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers


def usable_cores() -> int:
    """CPU cores that this process may use: those it may run on, or fewer if its container or job
    may not use all of their time."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), core_limit() or sys.maxsize)
    return os.cpu_count() or 1
