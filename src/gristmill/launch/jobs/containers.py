"""Running a job's command in a container."""

from __future__ import annotations

from gristmill.launch.jobs.batch import BatchJob


def container_words(job: BatchJob) -> list[str]:
    """The words before a command that run it in the job's image; none without one, or where the
    scheduler does it itself."""
    launch = job.launch
    if not launch.container or launch.container_runtime == "pyxis":
        return []
    inside = [str(path) for path in dict.fromkeys((job.work, job.folder.parent))]
    binds = [word for path in (*inside, *launch.mounts) for word in ("--bind", path)]
    devices = ["--nv"] if launch.gpus_per_node else []
    return ["apptainer", "exec", *devices, *binds, "--pwd", str(job.work), launch.container]
