"""A stand-in for PBS Pro and Cray PALS on one machine, as the commands that a user types.

    python pbs_server.py qsub FILE                   checks the #PBS lines, prints 123.pbs
    python pbs_server.py qstat -f -F json 123.pbs    what PBS Pro prints, with the same keys
    python pbs_server.py qdel 123.pbs                TERM, and KILL after the kill delay
    python pbs_server.py mpiexec -n 4 --ppn 2 ...    starts ranks as PALS does

The server is a folder, PBS_STANDIN of the environment:

    nodes              the names of its nodes, one on each line; addresses of this machine
    profile.json       what the start files of the user's shell set
    kill_delay         seconds from TERM to KILL
    jobs/123/          job.json (what qstat shows) · script · out and err while the job runs

Every job has a process of its own that waits for free nodes, runs the script and notes how it
ended. Like the real one, it runs the script in the home folder with the variables of the user's
shell and of PBS alone, holds output back until the job has ended, and kills what is left of a job
as soon as its script ends: a script without a trap ends with the TERM of qdel at once.

The names, formats and statuses are those of OpenPBS 23 and of logs from Polaris and Aurora. Array
jobs, holds, dependencies and start times are accepted by PBS and refused here.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import getopt
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SERVER = "pbs"
OPTIONS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:q:r:R:S:u:v:VW:XzP:"
"""Those of qsub, on the command line and on #PBS lines."""
NOT_HERE = "acChIJRuX"
RESOURCES = {"select", "place", "walltime", "ncpus", "mem", "filesystems", "min_walltime"}
CHUNK = {"ncpus", "ngpus", "mem", "mpiprocs", "ompthreads", "host", "system", "naccelerators"}
BINDINGS = r"none|numa|socket|core|thread|depth|user|verbose|list:[\d,:\-]+"
UNKNOWN, FINISHED = 153, 35
"""Exit statuses for a job that does not exist, and one that is over."""
KILLED_BY_WALLTIME = -29
TICK = 0.05


class CommandError(Exception):
    """What a command prints instead of doing its work."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


# ------------------------------------------------------------------ what a job asks for


@dataclass(frozen=True)
class Chunk:
    """So many nodes, each with so many lines in the node file."""

    count: int
    processes: int


@dataclass(frozen=True)
class Asked:
    """Options of qsub: those of the command line, then those of #PBS lines."""

    options: Mapping[str, str]
    resources: Mapping[str, str]

    @property
    def chunks(self) -> list[Chunk]:
        chunks = []
        for text in self.resources.get("select", "1").split("+"):
            count, *more = text.split(":") if text[:1].isdigit() else ("1", *text.split(":"))
            given = dict(pair.partition("=")[::2] for pair in more)
            unknown = given.keys() - CHUNK
            if unknown or not count.isdigit() or int(count) < 1:
                wrong = f"Unknown resource: {sorted(unknown)[0]}" if unknown else "Illegal select"
                raise CommandError(f"qsub: {wrong}", 188)
            chunks.append(Chunk(int(count), int(given.get("mpiprocs", "1"))))
        return chunks

    @property
    def seconds(self) -> float:
        text = self.resources.get("walltime", "24:00:00")
        if not re.fullmatch(r"\d+(:\d\d){0,2}", text):
            raise CommandError("qsub: illegal -l value\nusage: qsub [-A account_string] ...", 2)
        return float(sum(int(n) * 60**i for i, n in enumerate(reversed(text.split(":")))))


def parse_options(words: Sequence[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Options, resources of -l, and what is left. -l and -v may be given several times."""
    found, rest = getopt.getopt(list(words), OPTIONS)
    options: dict[str, str] = {}
    resources: dict[str, str] = {}
    for flag, value in found:
        name = flag[1:]
        if name == "l":
            resources |= dict(pair.partition("=")[::2] for pair in value.split(","))
        elif name == "v" and "v" in options:
            options["v"] += f",{value}"
        else:
            options[name] = value
    return options, resources, rest


def directives(script: str) -> Iterator[str]:
    """The #PBS lines before the first command; later ones are comments to PBS."""
    for line in script.splitlines():
        if line.startswith("#PBS"):
            yield line[4:].strip()
        elif line.strip() and not line.lstrip().startswith(("#", ":")):
            return


def read_request(words: Sequence[str], script: str) -> Asked:
    """What the command line and the script ask for; the command line counts more."""
    options: dict[str, str] = {}
    resources: dict[str, str] = {}
    for line in directives(script):
        try:
            more, amounts, rest = parse_options(shlex.split(line))
        except (getopt.GetoptError, ValueError):
            rest = [line]
        if rest:
            raise CommandError(f"qsub: directive error: {line}")
        options, resources = options | more, resources | amounts
    more, amounts, _ = parse_options(words)
    asked = Asked(options | more, resources | amounts)
    unknown = asked.resources.keys() - RESOURCES
    if unknown:
        raise CommandError(f"qsub: Unknown resource: {sorted(unknown)[0]}", 188)
    refused = sorted(set(NOT_HERE) & asked.options.keys())
    if refused:
        raise CommandError(f"qsub: -{refused[0]} is not part of this stand-in", 2)
    patterns = {"N": r"[A-Za-z0-9_.+-]{1,230}", "j": "oe|eo|n", "r": "y|n"}
    patterns |= {"k": "n|(?!.*(.).*\\1)[oed]{1,3}"}
    for name, pattern in patterns.items():
        if not re.fullmatch(pattern, asked.options.get(name, "n")):
            raise CommandError(f"qsub: illegal -{name} value\nusage: qsub [-A account] ...", 2)
    _ = asked.chunks, asked.seconds
    return asked


# ------------------------------------------------------------------ the server


class JobFolder:
    """One job on disk. Only its own process changes job.json once it has been submitted."""

    def __init__(self, server: Path, number: str) -> None:
        self.server = server
        self.path = server / "jobs" / number
        self.id = f"{number}.{SERVER}"

    def read(self) -> dict[str, Any]:
        job: dict[str, Any] = json.loads((self.path / "job.json").read_text())
        return job

    def write(self, **changes: Any) -> None:
        file = self.path / "job.json"
        job = (self.read() if file.exists() else {}) | changes
        new = file.with_suffix(".new")
        new.write_text(json.dumps(job, indent=4))
        new.replace(file)

    @property
    def deleted(self) -> bool:
        return (self.path / "deleted").exists()


def open_server() -> Path:
    return Path(os.environ["PBS_STANDIN"])


def find_job(command: str, name: str) -> JobFolder:
    number = name.partition(".")[0]
    job = JobFolder(open_server(), number)
    if not number.isdigit() or not (job.path / "job.json").exists():
        raise CommandError(f"{command}: Unknown Job Id {name}", UNKNOWN)
    return job


@contextlib.contextmanager
def locked(server: Path) -> Iterator[None]:
    with (server / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def qsub(words: Sequence[str]) -> None:
    try:
        *_, rest = parse_options(words)
    except getopt.GetoptError as error:
        raise CommandError(f"qsub: {error}\nusage: qsub [-A account_string] ...", 2) from error
    if len(rest) > 1:
        raise CommandError("usage: qsub [-A account_string] ...", 2)
    try:
        script = Path(rest[0]).read_text() if rest else sys.stdin.read()
    except OSError as error:
        raise CommandError(f"qsub: script file:: {error.strerror}") from error
    asked = read_request(words, script)
    server = open_server()
    with locked(server):
        number = str(max((int(one.name) for one in (server / "jobs").iterdir()), default=100) + 1)
        job = JobFolder(server, number)
        job.path.mkdir()
        (job.path / "script").write_text(script)
        job.write(**_attributes(job, asked, name=Path(rest[0]).name if rest else "STDIN"))
    # The server is not part of the job in which qsub may run, and must not be killed with it.
    around = {name: text for name, text in os.environ.items() if not name.startswith("PBS_")}
    subprocess.Popen(
        [sys.executable, "-IS", __file__, "run", number],
        env={**around, "PBS_STANDIN": str(server)},
        stdin=subprocess.DEVNULL,
        stdout=(job.path / "server.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    print(job.id)


def _attributes(job: JobFolder, asked: Asked, *, name: str) -> dict[str, Any]:
    """The attributes of a new job, as qstat shows them."""
    options = asked.options
    name, number = options.get("N", name), job.path.name
    user, folder = os.environ.get("USER", "root"), Path.cwd()
    variables = {f"PBS_O_{key}": os.environ.get(key, "") for key in ("HOME", "PATH", "SHELL")}
    variables |= {"PBS_O_WORKDIR": str(folder), "PBS_O_HOST": SERVER, "PBS_O_QUEUE": "workq"}
    if "V" in options:
        variables |= os.environ
    for pair in filter(None, options.get("v", "").split(",")):
        key, equals, value = pair.partition("=")
        variables[key] = value if equals else os.environ.get(key, "")

    def place(flag: str, kind: str, short: str) -> str:
        path = options.get(flag, f"{name}.{short}{number}").rpartition(":")[2]
        full = folder / path
        return str(full / f"{job.id}.{kind}" if path.endswith("/") or full.is_dir() else full)

    now = time.ctime()
    return {
        "Job_Name": name,
        "Job_Owner": f"{user}@{SERVER}",
        "job_state": "Q",
        "queue": options.get("q", "workq"),
        "server": SERVER,
        "ctime": now,
        "qtime": now,
        "Join_Path": options.get("j", "n"),
        "Keep_Files": options.get("k", "n"),
        "Output_Path": f"{SERVER}:{place('o', 'OU', 'o')}",
        "Error_Path": f"{SERVER}:{place('e', 'ER', 'e')}",
        "Rerunable": str(options.get("r", "y") == "y"),
        "Account_Name": options.get("A", ""),
        "Resource_List": {"walltime": "24:00:00", "select": "1", **asked.resources},
        "Shell_Path_List": options.get("S", "/bin/bash"),
        "Variable_List": variables,
        "substate": 10,
    }


def qstat(words: Sequence[str]) -> None:
    options, names = getopt.gnu_getopt(list(words), "fF:x")
    given = dict(options)
    if given.get("-F", "json") != "json" or ("-F" in given and "-f" not in given):
        raise CommandError("qstat: this stand-in knows -f -F json alone", 2)
    if not names:
        names = sorted(one.name for one in (open_server() / "jobs").iterdir())
    shown: dict[str, dict[str, Any]] = {}
    status = 0
    for name in names:
        try:
            job = find_job("qstat", name)
        except CommandError as error:
            print(error, file=sys.stderr)
            status = error.status
            continue
        attributes = job.read()
        if attributes["job_state"] == "F" and "-x" not in given:
            hint = "Job has finished, use -x or -H to obtain historical job information"
            print(f"qstat: {job.id} {hint}", file=sys.stderr)
            status = FINISHED
            continue
        shown[job.id] = attributes
    if "-f" in given:
        head = {"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": SERVER}
        print(json.dumps({**head, **({"Jobs": shown} if shown else {})}, indent=4))
    elif shown:
        print(f"{'Job id':<18}{'Name':<18}{'User':<18}{'Time Use':<9}S Queue")
        print(f"{'-' * 16:<18}{'-' * 16:<18}{'-' * 16:<18}{'-' * 8:<9}- -----")
        for key, one in shown.items():
            user = one["Job_Owner"].partition("@")[0]
            line = f"{key:<18}{one['Job_Name'][:16]:<18}{user:<18}{'00:00:00':<9}"
            print(f"{line}{one['job_state']} {one['queue']}")
    if status:
        raise SystemExit(status)


def qdel(words: Sequence[str]) -> None:
    status = 0
    for name in words:
        try:
            job = find_job("qdel", name)
            if job.read()["job_state"] == "F":
                raise CommandError(f"qdel: Job has finished {job.id}", FINISHED)
            (job.path / "deleted").touch()
        except CommandError as error:
            print(error, file=sys.stderr)
            status = error.status
    if status:
        raise SystemExit(status)


# ------------------------------------------------------------------ a job


def run(words: Sequence[str]) -> None:
    """The process of one job, from the queue to its end."""
    job = JobFolder(open_server(), words[0])
    try:
        nodes = _wait_for_nodes(job)
        status = None if nodes is None else _run_script(job, nodes)
    finally:
        _kill_all(job)
        _deliver_output(job)
    over: dict[str, Any] = {"job_state": "F", "substate": 92, "mtime": time.ctime()}
    if status is None:
        over |= {"substate": 91, "comment": "Job deleted before it ran"}
    else:
        over["Exit_status"] = status
    job.write(**over)


def _wait_for_nodes(job: JobFolder) -> list[str] | None:
    """The lines of the node file; None if the job is deleted before there are nodes for it."""
    chunks = Asked({}, job.read()["Resource_List"]).chunks
    wanted = [chunk.processes for chunk in chunks for _ in range(chunk.count)]
    every = (job.server / "nodes").read_text().split()
    if len(wanted) > len(every):
        job.write(comment="Can Never Run: Insufficient amount of resource: vnode")
    while not job.deleted:
        with locked(job.server):
            taken = {
                place.partition("/")[0]
                for file in (job.server / "jobs").glob("*/job.json")
                for one in [json.loads(file.read_text())]
                if one["job_state"] in "RE"
                for place in one["exec_host"].split("+")
            }
            free = [node for node in every if node not in taken]
            if len(free) >= len(wanted):
                nodes = free[: len(wanted)]
                job.write(
                    job_state="R",
                    substate=42,
                    run_count=1,
                    stime=time.ctime(),
                    exec_host="+".join(f"{node}/0" for node in nodes),
                )
                return [n for n, lines in zip(nodes, wanted, strict=True) for _ in range(lines)]
        time.sleep(TICK)
    return None


def _run_script(job: JobFolder, nodes: Sequence[str]) -> int:
    """Run the script; how it ended, as PBS writes it."""
    attributes = job.read()
    (job.path / "nodefile").write_text("".join(f"{node}\n" for node in nodes))
    profile = json.loads((job.server / "profile.json").read_text())
    environment = {
        **profile,
        **attributes["Variable_List"],
        "PATH": profile["PATH"],
        "PBS_JOBID": job.id,
        "PBS_JOBNAME": attributes["Job_Name"],
        "PBS_QUEUE": attributes["queue"],
        "PBS_NODEFILE": str(job.path / "nodefile"),
        "PBS_NODENUM": "0",
        "PBS_TASKNUM": "1",
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBDIR": profile["HOME"],
        "PBS_STANDIN": str(job.server),
    }
    spool = _output_paths(job) if "d" in attributes["Keep_Files"] else {}
    with contextlib.ExitStack() as stack:
        files = {
            kind: stack.enter_context(spool.get(kind, job.path / kind).open("wb"))
            for kind in ("out", "err")
            if kind not in _joined(attributes)
        }
        script = subprocess.Popen(
            [attributes["Shell_Path_List"], str(job.path / "script")],
            cwd=profile["HOME"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=files.get("out", files.get("err")),
            stderr=files.get("err", files.get("out")),
            start_new_session=True,
        )
        job.write(session_id=script.pid)
        overdue = _wait(job, script, seconds=Asked({}, attributes["Resource_List"]).seconds)
    if overdue:
        return KILLED_BY_WALLTIME
    return script.returncode if script.returncode >= 0 else 256 - script.returncode


def _wait(job: JobFolder, script: subprocess.Popen[bytes], *, seconds: float) -> bool:
    """Wait for the script, and end it when that is asked for or its time is over; whether it is."""
    began, term_at = time.monotonic(), None
    delay = float((job.server / "kill_delay").read_text())
    while script.poll() is None:
        now = time.monotonic()
        if term_at is None and (job.deleted or now > began + seconds):
            term_at = now
            job.write(job_state="E", substate=50)
            _signal_session(script.pid, signal.SIGTERM)
        if term_at is not None and now > term_at + delay:
            _signal_session(script.pid, signal.SIGKILL)
        time.sleep(TICK)
    return term_at is not None and not job.deleted


def _signal_session(session: int, number: int) -> None:
    for pid, stat in _processes():
        if int(stat.rpartition(")")[2].split()[3]) == session:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _kill_all(job: JobFolder) -> None:
    """Kill everything that the job has started, on all its nodes."""
    mark = f"PBS_JOBID={job.id}".encode()
    for pid, _ in _processes():
        with contextlib.suppress(OSError):
            values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if mark in values and f"PBS_STANDIN={job.server}".encode() in values:
                os.kill(pid, signal.SIGKILL)


def _processes() -> Iterator[tuple[int, str]]:
    """Every process of this machine but this one, with what the kernel says of it."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / "stat").read_text()


def _joined(attributes: Mapping[str, Any]) -> set[str]:
    """The stream that goes into the other one."""
    return {"oe": {"err"}, "eo": {"out"}}.get(attributes["Join_Path"], set())


def _output_paths(job: JobFolder) -> dict[str, Path]:
    attributes = job.read()
    names = {"out": "Output_Path", "err": "Error_Path"}
    return {kind: Path(attributes[name].partition(":")[2]) for kind, name in names.items()}


def _deliver_output(job: JobFolder) -> None:
    for kind, path in _output_paths(job).items():
        if (job.path / kind).exists():
            shutil.copyfile(job.path / kind, path)


# ------------------------------------------------------------------ PALS


class Parser(argparse.ArgumentParser):
    """Complains as the commands here do."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"mpiexec: {message}", 2)


def mpiexec(words: Sequence[str]) -> int:
    parser = Parser(prog="mpiexec", allow_abbrev=False)
    parser.add_argument("-n", "--np", "-np", dest="ranks", type=int, default=1)
    parser.add_argument("--ppn", type=int)
    parser.add_argument("--hostfile")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--cpu-bind", default="none")
    parser.add_argument("-d", "--depth", type=int, default=1)
    parser.add_argument("--line-buffer", action="store_true")
    parser.add_argument("-l", "--label", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    asked = parser.parse_args(list(words))
    if not asked.program or asked.program[0].startswith("-"):
        parser.error(f"unrecognized option: {(asked.program or ['no program'])[0]}")
    if not re.fullmatch(BINDINGS, asked.cpu_bind):
        parser.error(f"invalid --cpu-bind {asked.cpu_bind}")
    if any("=" not in pair for pair in asked.env):
        parser.error("--env takes NAME=VALUE")
    hosts = _read_hosts(asked.hostfile or os.environ.get("PBS_NODEFILE", ""))
    ppn = asked.ppn or -(-asked.ranks // len(hosts))
    if asked.ranks > ppn * len(hosts):
        parser.error(f"{asked.ranks} ranks do not fit {len(hosts)} hosts with {ppn} each")
    return _start_ranks(asked, hosts, ppn=ppn)


def _read_hosts(file: str) -> list[str]:
    try:
        hosts = list(dict.fromkeys(Path(file).read_text().split()))
    except OSError as error:
        raise CommandError(f"mpiexec: cannot read host file {file!r}", 1) from error
    known = (open_server() / "nodes").read_text().split()
    strangers = [host for host in hosts if host not in known]
    if strangers or not hosts:
        raise CommandError(f"mpiexec: no such host: {strangers or file}", 1)
    return hosts


def _start_ranks(asked: argparse.Namespace, hosts: Sequence[str], *, ppn: int) -> int:
    """Start all ranks, pass signals on, and end the others when one fails; the first status that
    is not 0."""
    arrived: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: arrived.append(number))
    application = os.urandom(16).hex()
    running: dict[int, subprocess.Popen[bytes]] = {}
    for rank in range(asked.ranks):
        node, local = divmod(rank, ppn)
        values = {
            "PALS_RANKID": rank,
            "PALS_LOCAL_RANKID": local,
            "PALS_NODEID": node,
            "PALS_APID": application,
            "PALS_DEPTH": asked.depth,
            "PMI_RANK": rank,
            "PMI_SIZE": asked.ranks,
            "PMI_LOCAL_RANK": local,
            "PMI_LOCAL_SIZE": min(ppn, asked.ranks - node * ppn),
        }
        own = {key: str(value) for key, value in values.items()}
        given = dict(pair.partition("=")[::2] for pair in asked.env)
        running[rank] = subprocess.Popen(
            asked.program,
            env={**os.environ, **given, **own},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            start_new_session=True,
        )
    first, kill_at = 0, float("inf")
    while running:
        while arrived:
            _send(running, arrived.pop(0))
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            if code and not first:
                first, kill_at = code if code > 0 else 128 - code, time.monotonic() + 30
                how = f"exited with code {code}" if code > 0 else f"died from signal {-code}"
                print(f"{hosts[rank // ppn]}: rank {rank} {how}", file=sys.stderr, flush=True)
                _send(running, signal.SIGTERM)
        if time.monotonic() > kill_at:
            _send(running, signal.SIGKILL)
        time.sleep(TICK)
    return first


def _send(running: Mapping[int, subprocess.Popen[bytes]], number: int) -> None:
    for process in running.values():
        process.send_signal(number)


COMMANDS = {one.__name__: one for one in (qsub, qstat, qdel, run, mpiexec)}


def main() -> None:
    try:
        raise SystemExit(COMMANDS[sys.argv[1]](sys.argv[2:]) or 0)
    except CommandError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.status) from error
    except getopt.GetoptError as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
