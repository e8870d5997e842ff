"""Which process this is, from the environment."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.base.process import Address, ProcessInfo, expand_hosts


def test_without_variables_there_is_one_process() -> None:
    place = ProcessInfo.current({"HOME": "/home/miller"})
    assert place == ProcessInfo(rank=0, local_rank=0, world=1, host=socket.gethostname())


def test_the_three_variables_of_torchrun_are_read() -> None:
    place = ProcessInfo.current({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"})
    assert (place.rank, place.local_rank, place.world) == (5, 1, 8)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ProcessInfo.current().world == 2


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "0"},
            "environment: RANK is set but LOCAL_RANK, WORLD_SIZE is not\n"
            "    set RANK, LOCAL_RANK and WORLD_SIZE, as torchrun does, or unset them",
        ),
        (
            {"LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            "environment: LOCAL_RANK is set but RANK is not\n"
            "    set RANK, LOCAL_RANK and WORLD_SIZE, as torchrun does, or unset them",
        ),
        (
            {"RANK": "first", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            "environment: RANK=first is not a whole number",
        ),
        (
            {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            "environment: RANK=2 does not fit WORLD_SIZE=2",
        ),
        (
            {"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            "environment: RANK=-1 does not fit WORLD_SIZE=2",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0"},
            "environment: RANK=0 does not fit WORLD_SIZE=0",
        ),
    ],
)
def test_variables_that_do_not_fit_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ProcessInfo.current(environment)
    assert str(caught.value) == message


def test_a_wrong_local_rank_is_named() -> None:
    with pytest.raises(UserError, match="LOCAL_RANK=7"):
        ProcessInfo.current({"RANK": "0", "LOCAL_RANK": "7", "WORLD_SIZE": "2"})


# ------------------------------------------------------------------ launchers

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-n1-4711@1",
}
SRUN = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_NNODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[07-09,12]",
}
PALS = {
    "PMI_RANK": "9",
    "PALS_RANKID": "9",
    "PMI_SIZE": "16",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "8",
    "PALS_APID": "a-b-c",
}
POD = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchrun_says_where_to_meet_and_who_answers() -> None:
    place = ProcessInfo.current(TORCHRUN)
    assert place.address == Address("n1", 29400) == ("n1", 29400)
    assert (place.local_world, place.nodes, place.agent, place.attempt) == (4, 2, True, 2)


def test_srun_is_read_with_the_first_host_of_its_list() -> None:
    place = ProcessInfo.current(SRUN)
    assert (place.rank, place.local_rank, place.world) == (5, 1, 7)
    assert (place.local_world, place.nodes) == (2, 4)
    assert place.address is not None and place.address.host == "n07"
    assert 15000 <= place.address.port < 30000


def test_the_port_follows_from_job_and_step() -> None:
    def port(**other: str) -> int:
        address = ProcessInfo.current({**SRUN, **other}).address
        assert address is not None
        return address.port

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert len({port(), port(SLURM_JOB_ID="813"), port(SLURM_STEP_ID="1")}) == 3


def test_tasks_of_every_node_alike() -> None:
    values = {name: value for name, value in SRUN.items() if "TASKS_PER_NODE" not in name}
    four = {**values, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "2"}
    assert ProcessInfo.current(four).local_world == 2
    uneven = {**values, "SLURM_NTASKS_PER_NODE": "2"}
    assert ProcessInfo.current(uneven).local_world is None


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290", "batch", "interactive"])
def test_a_batch_script_without_srun_is_one_process(step: str | None) -> None:
    values = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": step or ""}
    assert ProcessInfo.current(values) == ProcessInfo(host=socket.gethostname())


def test_open_mpi() -> None:
    place = ProcessInfo.current(OPEN_MPI)
    assert (place.rank, place.local_rank, place.world) == (3, 1, 4)
    assert (place.local_world, place.nodes) == (2, 2)
    assert place.address is None, "mpirun does not tell where the first process is"
    given = ProcessInfo.current({**OPEN_MPI, "MASTER_ADDR": "n1"}).address
    assert given is not None and given.host == "n1" and 15000 <= given.port < 30000
    both = {**OPEN_MPI, "MASTER_ADDR": "n1", "MASTER_PORT": "1234"}
    assert ProcessInfo.current(both).address == ("n1", 1234)


def test_processes_of_one_node_meet_there() -> None:
    address = ProcessInfo.current({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).address
    assert address is not None and address.host == "127.0.0.1"
    unnumbered = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert ProcessInfo.current(unnumbered).address == ("127.0.0.1", 29500)


def test_pals_in_a_pbs_job(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("x1000c0s0b0n0.hsn\nx1000c0s0b0n0.hsn\nx1000c0s0b0n1.hsn\n")
    pbs = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "77.pbs"}
    place = ProcessInfo.current({**PALS, **pbs})
    assert (place.rank, place.local_rank, place.world, place.nodes) == (9, 1, 16, 2)
    assert place.address is not None and place.address.host == "x1000c0s0b0n0.hsn"
    assert ProcessInfo.current(pbs) == ProcessInfo(host=socket.gethostname()), (
        "PBS alone starts one process"
    )
    assert ProcessInfo.current({**PALS, "PBS_NODEFILE": str(tmp_path / "gone")}).address is None


def test_a_pod_of_a_job_is_one_process() -> None:
    place = ProcessInfo.current(POD)
    assert (place.rank, place.local_rank, place.world) == (1, 0, 3)
    assert (place.local_world, place.nodes) == (1, 3)
    assert place.address == ("job-master-0", 23456)
    assert ProcessInfo.current({**POD, "PET_NPROC_PER_NODE": "auto"}) == place


def test_the_inner_launcher_counts() -> None:
    within = {**SRUN, **PALS, **OPEN_MPI}
    assert ProcessInfo.current({**within, **TORCHRUN}) == ProcessInfo.current(TORCHRUN)
    assert ProcessInfo.current(within).world == 4
    assert ProcessInfo.current({**SRUN, **PALS}).world == 16


def test_srun_completes_what_others_leave_out() -> None:
    by_pmi = {"PMI_RANK": "5", "PMI_SIZE": "7"}
    assert ProcessInfo.current({**SRUN, **by_pmi}).local_rank == 1
    script = {"RANK": "5", "WORLD_SIZE": "7", "MASTER_ADDR": "n08", "MASTER_PORT": "1234"}
    place = ProcessInfo.current({**SRUN, **script})
    assert (place.local_rank, place.local_world, place.address) == (1, 2, ("n08", 1234))
    assert ProcessInfo.current({**SRUN, "WORLD_SIZE": "7"}).rank == 5


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**SRUN, "WORLD_SIZE": "8"}, "WORLD_SIZE=8 and SLURM_NTASKS=7 contradict each other"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "7"}, "RANK=0 and SLURM_PROCID=5 contradict"),
        ({**SRUN, "SLURM_PROCID": "7"}, "SLURM_PROCID=7 does not fit SLURM_NTASKS=7"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[7-"}, "SLURM_STEP_NODELIST=n[7- is not a list"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
            "SLURM_PROCID is set but SLURM_LOCALID, SLURM_STEP_NUM_TASKS is not",
        ),
        ({**PALS, "PALS_RANKID": "8"}, "PMI_RANK=9 and PALS_RANKID=8 contradict each other"),
        ({"PALS_RANKID": "8"}, "PALS_RANKID is set but PMI_LOCAL_RANK, PMI_SIZE is not"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK is set but PMI_LOCAL_RANK is not"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            "OMPI_COMM_WORLD_LOCAL_RANK=2 and OMPI_COMM_WORLD_SIZE=4 do not fit 2 processes",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "four"}, "OMPI_COMM_WORLD_SIZE=four is not a whole"),
        ({**OPEN_MPI, "MASTER_ADDR": "n1", "MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_ADDR is set but MASTER_PORT is not"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "MASTER_PORT=x is not a whole number"),
        ({**POD, "PET_NPROC_PER_NODE": "8"}, "asks for 8 processes in every pod"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK, LOCAL_RANK is not"),
    ],
)
def test_what_launchers_say_must_fit(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        ProcessInfo.current(environment)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].where == "environment"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[01-04,7],gpu2", ["n01", "n02", "n03", "n04", "n7", "gpu2"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("a.b-c,d[3]", ["a.b-c", "d3"]),
        ("", []),
        ("n[1-", []),
        ("n[x]", []),
        ("n[2-1]", []),
        ("n1;reboot", []),
    ],
)
def test_compressed_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_addresses_in_words() -> None:
    assert str(Address("n1", 80)) == "n1:80"
    assert str(Address("fe80::1", 80)) == "[fe80::1]:80"
