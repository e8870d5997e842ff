"""A real Slurm on this machine: a controller and four nodes, each with a slurmd of its own.

    munged ── slurmctld ──┬── slurmd -N n1      four CPUs on each node, whatever the machine has;
                          ├── slurmd -N n2      partition "main", and "urgent", whose jobs
                          ├── slurmd -N n3      preempt those of "main"
                          └── slurmd -N n4

It stands for a cluster as a user sees it: sbatch, srun, scancel, scontrol, requeueing, preemption,
and nodes that are lost. It needs root and no systemd, lives in one folder, and is gone afterwards.
What it cannot show: all nodes share one host name, one network and one disk.

Programs meet at the first node of their job, by its name. On a cluster the names of nodes resolve;
here a line in /etc/hosts does that as long as the cluster is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "setpriv")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
LIMIT = 120.0
"""Seconds that a daemon may take to start or to notice something."""
HOSTS = Path("/etc/hosts")
MARK = "# gristmill test cluster of process "

CONFIG = """\
ClusterName=gristmill
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
# A requeued job waits until its old credentials have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=20
SlurmctldTimeout=30
InactiveLimit=0
KillWait=30
MinJobAge=3600
Waittime=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
"""States of jobs that have ended; one that Slurm requeues passes through some of them."""


def missing() -> str | None:
    """Why there can be no Slurm on this machine; None if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        what = f"Slurm is not installed (no {', '.join(absent)})"
        return f"{what}: run `make test-cluster`, or apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a Slurm of its own needs root: run the tests as root, in a container for example"
    return None


@dataclass(frozen=True)
class SlurmJob:
    """What scontrol shows of a job."""

    id: str
    state: str
    exit_code: int
    signal: int
    """The signal that ended it; 0 if none did."""
    nodes: tuple[str, ...]
    restarts: int
    reason: str
    text: str = field(repr=False)
    """Everything, as it was printed."""


class SlurmCluster:
    """A running Slurm, and what tests do with it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gristmill-slurm-"))
        self.config = self.folder / "slurm.conf"
        kept = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
        self.environment = kept | {"SLURM_CONF": str(self.config), "PATH": PATH}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    # -------------------------------------------------------------- jobs

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """Run a command of Slurm; what it prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, cwd=cwd, timeout=600
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: Path | str, *options: str, cwd: Path | None = None) -> str:
        """Submit a script, or a command line, by sbatch; the id of the job."""
        what = [str(script)] if isinstance(script, Path) else ["--wrap", script]
        return self.run("sbatch", "--parsable", *options, *what, cwd=cwd).strip().partition(";")[0]

    def job(self, id: str) -> SlurmJob:
        """A job, or one task of an array, such as 12_3."""
        text = self.run("scontrol", "--oneliner", "show", "job", id).splitlines()[0]
        values = dict(re.findall(r"(\w+)=(\S*)", text))
        code, _, number = values["ExitCode"].partition(":")
        nodes = values.get("NodeList", "")
        hosts = "" if nodes in ("", "(null)") else self.run("scontrol", "show", "hostnames", nodes)
        return SlurmJob(
            id=id,
            state=values["JobState"],
            exit_code=int(code),
            signal=int(number),
            nodes=tuple(hosts.split()),
            restarts=int(values["Restarts"]),
            reason=values["Reason"],
            text=text,
        )

    def wait(self, id: str, *states: str, timeout: float = 300) -> SlurmJob:
        """Wait until a job has one of these states; without any, until it is over."""
        wanted = set(states) or OVER
        deadline, over_since = time.monotonic() + timeout, None
        while True:
            job, now = self.job(id), time.monotonic()
            if job.state in wanted:
                return job
            if job.state not in OVER:
                over_since = None
            elif over_since is None:
                over_since = now
            # A job that Slurm requeues is over only for a moment.
            elif now > over_since + 10:
                break
            if now > deadline:
                break
            time.sleep(0.2)
        raise AssertionError(f"job {id} is not {' or '.join(sorted(wanted))}: {job.text}")

    def cancel(self, id: str, *options: str) -> None:
        self.run("scancel", *options, id)

    # -------------------------------------------------------------- nodes

    def node_state(self, node: str) -> str:
        """Such as IDLE, MIXED, ALLOCATED or DOWN, with the flags that Slurm adds."""
        text = self.run("scontrol", "--oneliner", "show", "node", node, check=False)
        found = re.search(r"State=(\S+)", text)
        return found[1] if found else "UNKNOWN"

    def kill_node(self, node: str) -> None:
        """Lose a node: its slurmd and all that runs on it, without a word."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        # Those that watch the tasks first: they would report how the tasks have ended.
        _kill([*self._step_daemons(node), *self._tasks(node)])

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node, and wait until it takes jobs."""
        self._start(node, "slurmd", "-D", "-N", node)
        self._until(lambda: self.node_state(node) in ("IDLE", "MIXED", "ALLOCATED"), f"{node} up")

    def _tasks(self, node: str | None = None) -> Iterator[int]:
        """Processes of jobs of this cluster, of all nodes or of one."""
        wanted = {f"SLURM_CONF={self.config}".encode()}
        wanted |= set() if node is None else {f"SLURMD_NODENAME={node}".encode()}
        daemons = {daemon.pid for daemon in self._daemons.values()}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and int(folder.name) not in daemons:
                    values = (folder / "environ").read_bytes().split(b"\0")
                    if wanted <= set(values) and b"SLURM_JOB_ID=" in b"".join(values):
                        yield int(folder.name)

    def _step_daemons(self, node: str | None = None) -> Iterator[int]:
        """The slurmstepd of each step. They hide their environment, but keep their log open."""
        logs = {str(self.folder / f"{one}.log") for one in NODES if node in (None, one)}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and "slurmstepd" in (folder / "comm").read_text():
                    files = {str(one.readlink()) for one in (folder / "fd").iterdir()}
                    if files & logs:
                        yield int(folder.name)

    # -------------------------------------------------------------- from start to stop

    def start(self) -> None:
        """Start all daemons, and wait until every node takes jobs."""
        # Munge wants every user to reach its socket.
        self.folder.chmod(0o755)
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        port, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={number} CPUs=4"
            for node, number in zip(NODES, ports, strict=True)
        )
        self.config.write_text(CONFIG.format(port=port, folder=self.folder, nodes=nodes))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        _write_hosts(add=True)
        # All in this folder: as root, munged removes files with other rights than it expects.
        files = [
            f"--{name}={self.folder}/munge.{name.partition('-')[0]}"
            for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        ]
        self._start("munged", "munged", "--foreground", "--force", *files)
        self._until((self.folder / "munge.socket").exists, "munged up")
        self._start("slurmctld", "slurmctld", "-D")
        self._until(lambda: "is UP" in self.run("scontrol", "ping", check=False), "slurmctld up")
        for node in NODES:
            self._start(node, "slurmd", "-D", "-N", node)
        for node in NODES:
            self._until(lambda node=node: self.node_state(node) == "IDLE", f"{node} up")

    def stop(self) -> None:
        """End all jobs and daemons, and remove everything; also after half a start."""
        _kill([*self._step_daemons(), *self._tasks()])
        nodes = [self._daemons.pop(node) for node in NODES if node in self._daemons]
        controllers = list(reversed(self._daemons.values()))
        # A daemon that cannot reach the one it needs takes long to end.
        for daemons in (nodes, *([one] for one in controllers)):
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        _write_hosts(add=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name: str, program: str, *options: str) -> None:
        """Start a daemon that ends with this process, whatever happens to it."""
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", program, *options],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            ended = [name for name, one in self._daemons.items() if one.poll() is not None]
            late = time.monotonic() > deadline
            assert not ended and not late, f"no {what}; ended: {ended}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of every daemon."""
        files = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        tails = {one.name: one.read_text(errors="replace").splitlines()[-15:] for one in files}
        return "\n".join(f"{name}: {line}" for name, lines in tails.items() for line in lines)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _write_hosts(*, add: bool) -> None:
    """Add the names of the nodes to /etc/hosts, or remove them. Each process has a line of its
    own; lines of processes that are gone go too. In a container the file cannot be replaced."""
    with HOSTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = []
        for line in file.read().splitlines():
            pid = line.partition(MARK)[2]
            if not pid or (pid != str(os.getpid()) and Path(f"/proc/{pid}").exists()):
                lines.append(line)
        if add:
            lines.append(f"127.0.0.1 {' '.join(NODES)} {MARK}{os.getpid()}")
        file.seek(0)
        file.truncate()
        file.write("\n".join(lines) + "\n")
