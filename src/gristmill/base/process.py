"""Which process this is among those of the run: read once from the environment, then passed on.

    started by          rank                    on its node                   how many
    torchrun            RANK                    LOCAL_RANK                    WORLD_SIZE
    Open MPI            OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_LOCAL_RANK    OMPI_COMM_WORLD_SIZE
    MPICH, Cray PALS    PMI_RANK, PALS_RANKID   PMI_LOCAL_RANK and its like   PMI_SIZE
    srun                SLURM_PROCID            SLURM_LOCALID                 SLURM_NTASKS
    a PyTorchJob's pod  RANK                    always 0                      WORLD_SIZE

The first row that is there counts, since a launcher may run inside another: torchrun in a step of
srun, mpiexec in a PBS job. A job without a launcher is one process: PBS sets no ranks, and what
Slurm sets for a batch script speaks of tasks that nobody has started.

Processes meet at MASTER_ADDR and MASTER_PORT. Where these are not set, the job's first host and a
port made from the job's number serve as well, because all processes find the same.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from gristmill.base.errors import UserError

Values = Mapping[str, str]

_PORTS = range(15000, 30000)
"""Below those that systems give to outgoing connections."""
_USUAL_PORT = 29500
"""For a job that has no number; torch's own default."""
_STEPS_OF_NOBODY = ("batch", "extern", "interactive")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers the steps of batch scripts and interactive shells from the top."""


class Address(NamedTuple):
    """Where the processes of a run meet."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Place:
    """This process's rank among all, its rank on its node, and how many there are."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    host: str = "localhost"
    local_world: int | None = 1
    """Processes on this node, where it is known."""
    nodes: int | None = 1
    """Nodes of the run, where it is known."""
    address: Address | None = None
    """Where the processes meet, where it is known."""
    agent: bool = False
    """Whether a process of the launcher answers there, and not the first process of the run."""
    attempt: int = 0
    """How often the launcher has started all processes again at the same address."""

    @classmethod
    def current(cls, environment: Values | None = None) -> Place:
        """Read the variables that launchers set; without them there is one process."""
        given = os.environ if environment is None else environment
        values = {name: value for name, value in given.items() if value.strip()}
        launcher = next((one for one in _LAUNCHERS if one.present(values)), None)
        own = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in values]
        if "RANK" in own or "LOCAL_RANK" in own or (own and launcher is None):
            return _by_torchrun(values, launcher)
        if launcher is None:
            return cls(host=socket.gethostname())
        return _by_launcher(values, launcher)


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher; of several names for one number, the first that is set."""

    rank: tuple[str, ...]
    local_rank: tuple[str, ...]
    world: tuple[str, ...]
    local_world: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    """What names the job, alike in all its processes and not alike in two jobs."""

    trusted: Callable[[Values], bool] = lambda values: True
    """Whether ranks that are set are those of processes that were started."""

    def present(self, values: Values) -> bool:
        return any(name in values for name in self.rank) and self.trusted(values)


def _is_step_of_tasks(values: Values) -> bool:
    """Whether srun started this process, and not sbatch or salloc."""
    step = values.get("SLURM_STEP_ID", values.get("SLURM_STEPID", "batch"))
    if step in _STEPS_OF_NOBODY:
        return False
    return not (step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP)


_TORCHRUN = _Launcher(
    rank=("RANK",),
    local_rank=("LOCAL_RANK",),
    world=("WORLD_SIZE",),
    local_world=("LOCAL_WORLD_SIZE",),
    nodes=("GROUP_WORLD_SIZE",),
)
_OPEN_MPI = _Launcher(
    rank=("OMPI_COMM_WORLD_RANK",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    world=("OMPI_COMM_WORLD_SIZE",),
    local_world=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_PMI = _Launcher(
    rank=("PMI_RANK", "PALS_RANKID"),
    local_rank=("PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
    world=("PMI_SIZE",),
    local_world=("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    job=("PALS_APID", "PMI_JOBID"),
)
_SLURM = _Launcher(
    rank=("SLURM_PROCID",),
    local_rank=("SLURM_LOCALID",),
    world=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_world=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    trusted=_is_step_of_tasks,
)
_LAUNCHERS = (_OPEN_MPI, _PMI, _SLURM)


# ------------------------------------------------------------------ the rows of the table


def _by_torchrun(values: Values, around: _Launcher | None) -> Place:
    """RANK and WORLD_SIZE, with LOCAL_RANK or something that stands for it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = [name for name in names if name in values]
    missing = [name for name in names if name not in values]
    if missing == ["LOCAL_RANK"] and around is not None:
        return _completed(values, around)
    one_for_each_pod = missing == ["LOCAL_RANK"] and {"MASTER_ADDR", "MASTER_PORT"} <= set(values)
    if missing and not one_for_each_pod:
        raise UserError(
            f"{given[0]} is set but {', '.join(missing)} is not",
            where="environment",
            remedy="start with torchrun, which sets all three, or unset them",
        )
    if one_for_each_pod:
        return _by_pod(values)
    return _place(
        values,
        _TORCHRUN,
        address=_address_given(values),
        agent=values.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(values, ("TORCHELASTIC_RESTART_COUNT",)) or 0,
    )


def _by_pod(values: Values) -> Place:
    """A PyTorchJob with one process in each pod."""
    each = values.get("PET_NPROC_PER_NODE", "1")
    if each.isdigit() and int(each) > 1:
        raise UserError(
            f"PET_NPROC_PER_NODE={each} asks for {each} processes in every pod, and LOCAL_RANK, "
            "which would tell them apart, is not set",
            where="environment",
            remedy="start with torchrun in the pod, or ask for one process in a pod",
        )
    one = {**values, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return _place(one, _TORCHRUN, address=_address_given(values))


def _completed(values: Values, around: _Launcher) -> Place:
    """RANK and WORLD_SIZE of a script inside a launcher, which knows the rank on the node."""
    place = _by_launcher(values, around)
    theirs, ours = _name(values, around.rank), _number(values, ("RANK",))
    if ours != place.rank:
        raise _contradiction(values, "RANK", theirs)
    return place


def _by_launcher(values: Values, launcher: _Launcher) -> Place:
    """MPI or Slurm. Where one of them does not tell the rank on the node, the next may."""
    local = launcher
    if _number(values, launcher.local_rank) is None:
        later = _LAUNCHERS[_LAUNCHERS.index(launcher) + 1 :]
        local = next((one for one in later if _same_place(values, one, launcher)), launcher)
    world = _name(values, launcher.world)
    if world in values:
        _require_equal(values, "WORLD_SIZE", world)
    place = _place(values, launcher, local=local)
    return _with_address(values, place, launcher)


def _same_place(values: Values, one: _Launcher, other: _Launcher) -> bool:
    return one.present(values) and all(
        _number(values, getattr(one, part)) == _number(values, getattr(other, part))
        for part in ("rank", "world")
    )


# ------------------------------------------------------------------ numbers


def _name(values: Values, names: tuple[str, ...]) -> str:
    """Which of the names is set; the first if none is."""
    return next((name for name in names if name in values), names[0])


def _number(values: Values, names: tuple[str, ...]) -> int | None:
    """The number under the first name that is set; None if there is none."""
    text = next((values[name] for name in names if name in values), None)
    try:
        return None if text is None else int(text)
    except ValueError as error:
        what = f"{_name(values, names)}={text} is not a whole number"
        raise UserError(what, where="environment") from error


def _place(
    values: Values,
    launcher: _Launcher,
    *,
    local: _Launcher | None = None,
    address: Address | None = None,
    agent: bool = False,
    attempt: int = 0,
) -> Place:
    """The numbers of a launcher; those on the node may be of another one around it."""
    local = local or launcher
    rank, local_rank, world = (
        _name(values, names) for names in (launcher.rank, local.local_rank, launcher.world)
    )
    _require(values, rank, local_rank, world)
    _require_equal(values, *launcher.rank)
    _require_equal(values, *local.local_rank)
    numbers = {name: int(values[name]) for name in (rank, local_rank, world)}
    for name in (rank, local_rank):
        if not 0 <= numbers[name] < numbers[world]:
            raise UserError(
                f"{name}={numbers[name]} does not fit {world}={numbers[world]}",
                where="environment",
            )
    here = (_tasks_here if local is _SLURM else _number)(values, local.local_world)
    if here is not None and not numbers[local_rank] < here <= numbers[world]:
        raise UserError(
            f"{local_rank}={numbers[local_rank]} and {world}={numbers[world]} do not fit "
            f"{here} processes on this node",
            where="environment",
        )
    nodes = _number(values, launcher.nodes)
    if nodes is None and here is not None and numbers[world] % here == 0:
        nodes = numbers[world] // here
    return Place(
        rank=numbers[rank],
        local_rank=numbers[local_rank],
        world=numbers[world],
        host=socket.gethostname(),
        local_world=here,
        nodes=nodes,
        address=address,
        agent=agent,
        attempt=attempt,
    )


def _require(values: Values, *names: str) -> None:
    missing = [name for name in names if name not in values]
    if missing:
        given = next(name for name in names if name in values)
        raise UserError(
            f"{given} is set but {', '.join(missing)} is not",
            where="environment",
            remedy="start with torchrun, or set RANK, LOCAL_RANK and WORLD_SIZE yourself",
        )
    try:
        for name in names:
            int(values[name])
    except ValueError as error:
        *first, last = names
        raise UserError(
            f"{', '.join(first)} and {last} must be whole numbers", where="environment"
        ) from error


def _require_equal(values: Values, *names: str) -> None:
    given = [name for name in names if name in values]
    for name in given[1:]:
        if _number(values, (name,)) != _number(values, (given[0],)):
            raise _contradiction(values, given[0], name)


def _contradiction(values: Values, one: str, other: str) -> UserError:
    return UserError(
        f"{one}={values[one]} and {other}={values[other]} contradict each other",
        where="environment",
        remedy=f"unset {one} if it is left over from another launcher",
    )


def _tasks_here(values: Values, names: tuple[str, ...]) -> int | None:
    """Slurm's tasks on this node: a count, or one for each node, where "2(x3),1" is 2, 2, 2, 1."""
    node = _number(values, ("SLURM_NODEID",)) or 0
    each: list[int] = []
    for part in values.get(_name(values, names), "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        each += [int(match[1])] * int(match[2] or 1) if match else []
    if len(each) == 1:
        each *= _number(values, _SLURM.nodes) or 1
    # What was asked of the whole job may stand there, too, and is not always what the step has.
    if sum(each) != _number(values, _SLURM.world):
        return None
    return each[node] if node < len(each) else None


# ------------------------------------------------------------------ where processes meet


def _address_given(values: Values) -> Address | None:
    """MASTER_ADDR and MASTER_PORT: both, or neither."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if name in values]
    if not given:
        return None
    if len(given) < len(names):
        missing = next(name for name in names if name not in values)
        raise UserError(f"{given[0]} is set but {missing} is not", where="environment")
    return Address(values["MASTER_ADDR"], _port_given(values))


def _port_given(values: Values) -> int:
    port = _number(values, ("MASTER_PORT",))
    if port is None or not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={port} is not a port", where="environment")
    return port


def _with_address(values: Values, place: Place, launcher: _Launcher) -> Place:
    """The address where it is given or follows from the job."""
    host = values.get("MASTER_ADDR") or _first_host(values, place)
    if host is None:
        return place
    port = _port_given(values) if "MASTER_PORT" in values else _port_of_job(values, launcher)
    return replace(place, address=Address(host, port))


def _first_host(values: Values, place: Place) -> str | None:
    """The host of the first process: launchers fill the job's hosts from the first on."""
    if place.local_world == place.world:
        return "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in values:
            return _expanded(values, name)[0]
    if "PBS_NODEFILE" in values:
        try:
            lines = Path(values["PBS_NODEFILE"]).read_text().split()
        except OSError:
            return None
        return lines[0] if lines else None
    return None


def _expanded(values: Values, name: str) -> list[str]:
    hosts = expand_hosts(values[name])
    if not hosts:
        raise UserError(f"{name}={values[name]} is not a list of hosts", where="environment")
    return hosts


def _port_of_job(values: Values, launcher: _Launcher) -> int:
    """A port that the processes of a job have in common and two jobs hardly have."""
    name = next((values[name] for name in launcher.job if name in values), None)
    if name is None and "SLURM_JOB_ID" in values:
        name = f"{values['SLURM_JOB_ID']}.{values.get('SLURM_STEP_ID', '')}"
    name = name or values.get("PBS_JOBID")
    if name is None:
        return _USUAL_PORT
    return _PORTS[zlib.crc32(name.encode()) % len(_PORTS)]


_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def expand_hosts(text: str) -> list[str]:
    """All hosts of a compressed list such as `n[01-04,7],gpu2`; none if it is not such a list."""
    hosts: list[str] = []
    # Commas inside brackets separate numbers, those outside separate hosts.
    for pattern in re.split(r",(?![^\[]*\])", text.strip()):
        expanded = _expand_one(pattern)
        if not expanded:
            return []
        hosts += expanded
    return hosts


def _expand_one(pattern: str) -> list[str]:
    match = _BRACKETS.search(pattern)
    if match is None:
        return [pattern] if re.fullmatch(r"[\w.\-]+", pattern) else []
    numbers: list[str] = []
    for part in match[1].split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if ends is None:
            return []
        first, last = ends[1], ends[2] or ends[1]
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    rest = _expand_one(pattern[match.end() :]) if pattern[match.end() :] else [""]
    return [f"{pattern[: match.start()]}{number}{tail}" for number in numbers for tail in rest]
