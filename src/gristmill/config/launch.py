"""The `[launch]` table: the job that runs a training on a cluster.

It says what to ask a scheduler for, and decides nothing about the training itself. `launch/` turns
it into a job script, in which every value but `setup` is quoted: none can run a command.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.config.settings import Count, Settings, WallTime

LauncherName = Literal["slurm", "pbs", "mpi", "kubernetes", "ray"]

_PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]"
Text = Annotated[str, Field(pattern=rf"^{_PRINTABLE}+$")]
"""One line of text."""
Word = Annotated[str, Field(pattern=r"^[\w@%+=:,./~&|()\[\]*?!<>{}^-]+$")]
"""One word as schedulers take it: an account, a queue, a constraint."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of an environment variable."""
OptionName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")]
ResourceName = Annotated[
    str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$")
]
"""The name of a resource; in Kubernetes it may have a prefix: rdma/hca."""
DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""The name of an object in Kubernetes."""
Words = Annotated[tuple[Word, ...], Field(strict=False)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*[KMGT]?$")]
"""An amount of memory such as 64G."""


class KubernetesConfig(Settings):
    """Settings for Kubernetes only."""

    kind: Literal["job", "pytorchjob"] = "job"
    """job: an Indexed Job, which every cluster has. pytorchjob: a PyTorchJob of Kubeflow's training
    operator."""
    namespace: DnsName | None = None
    """The namespace; that of kubectl's context if not given."""
    volumes: dict[DnsName, Text] = Field(default={})
    """Persistent volume claims by name, with the path where each is mounted. One of them has to
    hold the run folder and the token files."""
    service_account: DnsName | None = None
    """The service account of the pods."""
    node_selector: dict[Text, Text] = Field(default={})
    """Labels that nodes must have."""
    pull_secrets: Annotated[tuple[DnsName, ...], Field(strict=False)] = ()
    """Secrets for pulling the image."""
    shared_memory: Quantity = "8G"
    """Size of /dev/shm, which NCCL uses between processes of one pod."""


class LaunchConfig(Settings):
    """The job that runs a training on a cluster; `gristmill launch` reads it, `train` does not."""

    on: LauncherName | None = None
    """Where `gristmill launch` submits the run: slurm, pbs, mpi, kubernetes or ray. `--on`
    overrides it."""
    nodes: Count = 1
    """Nodes, or pods in Kubernetes."""
    processes_per_node: Count | None = None
    """Processes on each node, one for each device; gpus_per_node if not given, else 1."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs to ask for on each node; none are asked for if not given, as on clusters where a node
    always comes with all of its GPUs."""
    gpu: Word | None = None
    """The kind of GPUs on the nodes, as `gristmill plan` calls it, such as "h100-80gb". With it
    `launch` warns when `time` is shorter than planned, `launch --hours` finds the number of nodes,
    and `plan` plans for these nodes."""
    cpus_per_process: Count | None = None
    """CPU cores to ask for for each process; also its OMP_NUM_THREADS."""
    memory: Quantity | None = None
    """Memory to ask for on each node, such as "64G"."""
    time: WallTime | None = None
    """Wall time of the job, such as "6h". The run is saved and stopped before it ends, and with
    `requeue` it continues in another job."""
    stop_early: WallTime = "5m"
    """How long before the end of `time` the run is asked to save and stop."""
    requeue: bool = True
    """Whether a run that was stopped because its time is over is queued again, until it is done;
    also whether a scheduler may start it again after a node has failed."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often all processes are restarted within the job after a crash that may be temporary."""
    account: Word | None = None
    """The account or project that is charged."""
    queue: Word | None = None
    """The queue; Slurm calls it a partition, Kubernetes with Kueue a local queue."""
    qos: Word | None = None
    """Slurm's quality of service."""
    constraint: Text | None = None
    """Features that nodes must have, in Slurm's syntax."""
    reservation: Word | None = None
    """A reservation to run in."""
    exclusive: bool = False
    """Whether nodes are not shared with other jobs."""
    filesystems: Words = ()
    """File systems that the job needs, as PBS on Polaris asks for them: ["home", "grand"]."""
    resources: dict[ResourceName, Word | int] = Field(default={})
    """More resources of each node: in PBS they are added to `select`, such as
    { system = "polaris" }; in Kubernetes they are limits of the container; in Ray, custom
    resources."""
    options: dict[OptionName, Text | int | Literal[True]] = Field(default={})
    """More options of the scheduler, by their long names: { switches = 1 } becomes `--switches=1`
    for Slurm, and { "W" = "group_list=x" } becomes `-W group_list=x` for PBS. true gives an option
    without a value."""
    mail: Annotated[str, Field(pattern=r"^[\w.+-]+@[\w.-]+$")] | None = None
    """Address for the scheduler's mails."""
    mail_on: Annotated[
        tuple[Literal["begin", "end", "fail"], ...], Field(strict=False, min_length=1)
    ] = ("begin", "end", "fail")
    """When the scheduler sends mail."""
    modules: Words = ()
    """Environment modules to load, such as ["cray-python", "cudatoolkit-standalone/11.7.1"]."""
    setup: Texts = ()
    """Lines of shell to run before the training, on the first node and in this order, such as
    ["source venv/bin/activate"]. No other setting of this table is run."""
    environment: dict[Name, Text] = Field(default={})
    """Environment variables of all processes."""
    python: Text | None = None
    """The Python that has gristmill installed; the one that runs `gristmill launch` if not given,
    and "python" in a container."""
    container: Text | None = None
    """Image to run in: a file or a name for Slurm's pyxis, a file for Apptainer, a name for
    Kubernetes."""
    container_runtime: Literal["pyxis", "apptainer"] | None = None
    """What runs the image; pyxis in Slurm and apptainer elsewhere if not given."""
    mounts: Texts = ()
    """Folders to mount in the container, each as "/outside:/inside"; the working folder and the run
    folder always are."""
    starter: Literal["tasks", "torchrun"] = "tasks"
    """tasks: the scheduler starts every process. torchrun: it starts one torchrun on each node,
    which starts the processes of the node."""
    mpi: Literal["openmpi", "mpich", "pals"] | None = None
    """The implementation of mpiexec: Open MPI, MPICH (and Intel MPI), or Cray PALS. The job detects
    it if not given."""
    hostfile: Text | None = None
    """A file with one host per line, for `mpi`; this machine alone if not given."""
    kubernetes: KubernetesConfig | None = None
    """Settings for Kubernetes only."""
    address: Text | None = None
    """Where Ray's cluster is: the address of its dashboard, such as "http://head:8265"; found from
    RAY_ADDRESS if not given."""

    @property
    def each(self) -> int:
        """Processes on each node."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def processes(self) -> int:
        """Processes of the whole run."""
        return self.nodes * self.each
