"""Fixtures for tests of the torch half: tiny token files and run files, made in a moment."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Read when torch is imported, here and in processes that tests start. Test processes are more than
# cores already: with two threads each they took more than twice as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What several folders of tests use, also in processes that they start.
sys.path.append(str(Path(__file__).parent))

import store_server
import torch
from safetensors.torch import load_file, save_file

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from gristmill.checkpoint.layout import CheckpointFolder, step_of
from gristmill.checkpoint.tensorfile import open_tensors
from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig
from gristmill.hub import buckets, retry
from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.tokenizer import open_tokenizer

# A busy machine may take a hundred times as long for one example as for the next.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


def pytest_configure() -> None:
    """A background job of a script ignores INT from the start, and one under nohup HUP. Processes
    that tests start would inherit that."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


LONGEST = ("train", "strategies", "distributed", "benchmarks", "docs", "cli")
"""Folders whose tests take longest. They come first, so that workers end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        return places.get(item.path.relative_to(tests).parts[0], len(places))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """The processes of tests end at bad moments, but the machine does not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of objects, to which addresses of S3 and of Google lead as well."""
    server = store_server.StoreServer()
    environment = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "STORAGE_EMULATOR_HOST": server.url,
        "FSSPEC_GCS_TOKEN": "anon",
        "no_proxy": "127.0.0.1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.001)
    for connect in (buckets._s3, buckets._google):
        connect.cache_clear()
    yield server
    server.close()


WORDS = "the mill turns and grinds the corn into flour while water runs below the wheel".split()


def tiny_documents(count: int = 60) -> list[Document]:
    rng = random.Random(5)
    texts = (" ".join(rng.choices(WORDS, k=rng.randint(20, 60))) for _ in range(count))
    return [Document(text + ".", f"tiny:{number}") for number, text in enumerate(texts, 1)]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of a small text, one id a byte."""
    prefix = tmp_path_factory.mktemp("tokens") / "tiny"
    prepare_documents(tiny_documents(), tokenizer=open_tokenizer("bytes"), output=prefix)
    return prefix


RUN = """
name = "tiny"
folder = "{folder}"
[model]
layers = 2
heads = 2
width = 16
context = 24
[data]
paths = "{tokens}"
split = "90,10"
[train]
until = "12 steps"
batch = 4
[optim]
lr = 1e-2
[validate]
every = "4 steps"
windows = 8
[checkpoint]
every = "3 steps"
[runtime]
device = "cpu"
threads = 1
"""


@pytest.fixture
def run_text(tokens: Path, tmp_path: Path) -> Callable[..., str]:
    """The run file of a run of a few seconds."""
    return lambda folder="run": RUN.format(folder=tmp_path / folder, tokens=tokens)


@pytest.fixture
def make_run(run_text: Callable[..., str]) -> Callable[..., RunConfig]:
    """Settings of a run of a few seconds, with settings replaced as on the command line."""

    def make(*settings: str, folder: str = "run") -> RunConfig:
        return load_text(run_text(folder), settings, place="tiny.toml")

    return make


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files in which, read in order by 4 samples of 24 tokens, the batches of steps 41, and
    61 to 64, are noise."""
    rng, per_step = random.Random(3), 4 * 24
    text = " ".join(rng.choices(WORDS[:9], k=3000))[: 110 * per_step]
    for steps in (range(41, 42), range(61, 65)):
        begin, end = (steps.start - 1) * per_step, (steps.stop - 1) * per_step
        noise = "".join(chr(rng.randrange(33, 126)) for _ in range(end - begin))
        text = text[:begin] + noise + text[end:]
    prefix = tmp_path_factory.mktemp("poisoned") / "text"
    prepare_documents([Document(text, "text:1")], tokenizer=open_tokenizer("bytes"), output=prefix)
    return prefix


@dataclass
class Content:
    """What the checkpoint of one process holds."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: Any


@pytest.fixture
def rewrite() -> Callable[[Path, Callable[[Content], Any]], None]:
    """Commit a checkpoint again with other content, for which its manifest then holds."""

    def write(path: Path, change: Callable[[Content], Any]) -> None:
        folder = CheckpointFolder(path.parent)
        staging = folder.begin(step_of(path))
        tensors = (load_file(path / f"{kind}.safetensors") for kind in ("model", "optimizer"))
        content = Content(*tensors, json.loads((path / "state.json").read_text()))
        change(content)
        save_file(content.model, staging / "model.safetensors")
        save_file(content.optimizer, staging / "optimizer.safetensors")
        state = content.state if isinstance(content.state, str) else json.dumps(content.state)
        (staging / "state.json").write_text(state)
        shutil.rmtree(path)
        folder.commit(staging)

    return write


# ------------------------------------------------------------------ runs to compare

TIMED = {
    "time",
    "mfu",
    "mfu_causal",
    "tokens_per_second",
    "step_seconds",
    "tflops",
    "tflops_causal",
    "memory_bytes",
}
TIMED |= {"data_wait", "sync_wait", "seconds"}


class Runs:
    """What two runs must have in common to count as the same."""

    def history(self, folder: Path) -> list[dict[str, Any]]:
        """All numbers of a run that must not depend on when it was interrupted."""
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [
            {key: value for key, value in line.items() if key not in TIMED}
            for line in lines
            # What a host was busy with, and when, is another matter.
            if line["kind"] not in ("event", "system", "straggler")
        ]

    def tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        """Weights and optimizer state of the newest checkpoint, and what its strategy keeps."""
        newest = CheckpointFolder(folder / "checkpoints").newest_intact().path
        assert newest is not None
        stored = {kind: open_tensors(newest, kind) for kind in ("model", "optimizer", "strategy")}
        return {
            f"{kind}:{name}": one.read_exact(name)
            for kind, one in stored.items()
            for name in one.shapes
        }

    def assert_same(self, one: Path, two: Path) -> None:
        """Equal numbers at every step, equal bits at the end."""
        assert self.history(one) == self.history(two)
        left, right = self.tensors(one), self.tensors(two)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def runs() -> Runs:
    return Runs()


# ------------------------------------------------------------------ several processes

CONTEXT = multiprocessing.get_context("forkserver")
"""Children come from a process with one thread, in which torch is imported already: a copy of this
one could wait for ever for a lock that another thread held. There is one such process for all
tests."""
CONTEXT.set_forkserver_preload(
    [
        *("gristmill.cli.main", "gristmill.train.run"),
        *("gristmill.strategies.fsdp", "gristmill.strategies.pipeline"),
        "pytest",  # which the files of tests import
    ]
)

MEMBER = """
import datetime, os, runpy, traceback
import torch
import torch.distributed as dist

torch.set_num_threads(1)
os.fsync = lambda handle: None
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
try:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(meeting, processes),
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(seconds=120),
    )
    result = runpy.run_path(file)[name](*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    pipe.send(("done", result))
except BaseException:
    pipe.send(("failed", traceback.format_exc()))
"""


@pytest.fixture
def crowd(tmp_path: Path) -> Callable[..., list[Any]]:
    """Call a function of a test file in so many gloo processes; what each returns, by rank."""
    meetings = 0

    def call(processes: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        nonlocal meetings
        meetings += 1
        common = {
            "processes": processes,
            "meeting": str(tmp_path / f"meeting-{meetings}"),
            "file": inspect.getfile(function),
            "name": function.__name__,
            "args": args,
        }
        pipes, members = [], []
        for rank in range(processes):
            ours, theirs = CONTEXT.Pipe()
            names = {**common, "rank": rank, "pipe": theirs}
            member = CONTEXT.Process(target=exec, args=(MEMBER, names), daemon=True)
            member.start()
            theirs.close()
            pipes.append(ours)
            members.append(member)
        answers = [_answer(pipe) for pipe in pipes]
        for member in members:
            member.join(10)
            member.kill()
        failures = [
            f"rank {rank}: {what}" for rank, (how, what) in enumerate(answers) if how != "done"
        ]
        assert not failures, "\n".join(failures)
        return [what for _, what in answers]

    return call


def _answer(pipe: Any) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return "died", "ended without a word"


# ------------------------------------------------------------------ commands

COMMAND = """
import os, sys

for number, name in enumerate(("output", "errors"), 1):
    os.dup2(os.open(os.path.join(said, name), os.O_WRONLY | os.O_CREAT), number)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
sys.argv = ["gristmill", *words]
exec(first)
from gristmill.__main__ import main
main()
"""


@dataclass
class Started:
    """A command that runs in a process of its own."""

    words: list[str]
    said: Path
    process: Any

    @property
    def pid(self) -> int:
        pid: int = self.process.pid
        return pid

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait until it has ended."""
        self.process.join(240)
        self.process.kill()
        texts = ((self.said / name).read_text() for name in ("output", "errors"))
        return subprocess.CompletedProcess(self.words, self.process.exitcode, *texts)


@pytest.fixture
def begin_gristmill(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Started]]:
    """Begin a command line in a process of its own, which need not import the program first."""
    started: list[Started] = []

    def begin(*words: object, env: Mapping[str, str] = os.environ, first: str = "") -> Started:
        """With code that the process runs before the command."""
        said = tmp_path_factory.mktemp("said")
        command = ["gristmill", *map(str, words)]
        names = {"words": command[1:], "said": said, "folder": Path.cwd(), "environment": dict(env)}
        process = CONTEXT.Process(target=exec, args=(COMMAND, {**names, "first": first}))
        process.start()
        started.append(Started(command, said, process))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()


@pytest.fixture
def gristmill(
    begin_gristmill: Callable[..., Started],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command line in a process of its own, to its end."""
    return lambda *words, **options: begin_gristmill(*words, **options).end()
