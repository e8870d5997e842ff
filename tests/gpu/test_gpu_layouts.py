"""Layouts on one GPU that all of their processes share: tensors are CUDA's and go through host
memory, and one process on the same GPU must get the same, as near as on the CPU.

Processes that use CUDA take ten seconds to start, so all cases of a number of processes follow each
other in the same ones. Each test says of all of its cases how far they are off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from layout_cases import (
    EXACT,
    GPT2,
    LAYOUTS,
    MODERN,
    MORE,
    RESUMED,
    Crowd,
    Curve,
    all_go_on,
    assert_close,
    exact_pairs,
    go_on,
    model_for,
    parallel_words,
    run,
    wholes_and_halves,
)

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.config.schema import RunConfig
from gristmill.distributed.staged import StagedGroup
from gristmill.launch.starting import free_port
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EAGER = ('runtime.device="cuda"', "runtime.compile=false")
EXACTLY = ("runtime.deterministic=true", 'precision.compute="fp32"', "precision.tf32=false")
SHARED = "parallel.share_gpu=true"
STEPS = 4


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """What one process sets here, where the tests run."""
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(products)
    torch.use_deterministic_algorithms(False)


def part_from_crowd(port: int) -> None:
    """Leave the group in which the crowd has met, so that the run makes its own."""
    dist.destroy_process_group()
    size = os.environ["WORLD_SIZE"]
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({**found, "LOCAL_WORLD_SIZE": size, "GROUP_WORLD_SIZE": "1"})


class Case(NamedTuple):
    """A layout, and what it computes."""

    layout: tuple[str, ...]
    settings: tuple[str, ...]
    packed: bool = False
    far: float = 5e-6
    """How far losses may be from those of one process."""
    format: tuple[str, ...] = (*EAGER, *EXACTLY)

    def words(self, *, alone: bool) -> tuple[str, ...]:
        return (*self.format, *self.settings, *(() if alone else (*self.layout, SHARED)))


THREE = {
    "copies": (3, ""),
    "shares": (3, "dp_shard=3"),
    "shares, gradients whole": (3, 'dp_shard=3 keep="gradients"'),
}
"""With three, the order of a sum shows."""
ADAMW = ("optim.eps=1e-4",)
SOAP = (
    *ADAMW,
    'optim.preconditioner.type="soap"',
    "optim.preconditioner.eps=1e-4",
    "optim.preconditioner.max_dim=32",
)
KFAC = (*ADAMW, 'optim.preconditioner.type="kfac"', "optim.preconditioner.damping=0.1")
SHARES, TENSOR = ("parallel.dp_shard=2",), ("parallel.tp=2",)
# Muon's iteration is in bf16 on a GPU; rounding decides in directions of which there is nothing.
OPTIMIZERS = {
    "muon, shares": Case(SHARES, GPT2, far=5e-3),
    "muon, tensor": Case(TENSOR, GPT2, far=5e-3),
    "soap, shares": Case(SHARES, SOAP, far=1e-3),
    "kfac, shares": Case(SHARES, KFAC, far=1e-3),
}
HALF = ('runtime.device="cuda"', 'runtime.compile="blocks"', 'precision.compute="bf16"')
COMPILED = {
    "bf16, compiled": Case((), ADAMW, far=0.05, format=HALF),
    "bf16, compiled, shares": Case(SHARES, ADAMW, far=0.05, format=HALF),
    "bf16, compiled, tensor": Case(TENSOR, ADAMW, far=0.05, format=HALF),
    "bf16, compiled, zero-bubble": Case(
        ("parallel.pp=2", 'parallel.schedule="zero-bubble"'),
        (*ADAMW, "model.layers=4"),
        far=0.05,
        format=HALF,
    ),
}
"""Every layout rounds at places of its own: to 1 % of losses of 5.5."""


def cases_of(processes: int) -> dict[str, Case]:
    found: dict[str, Case] = {}
    chosen = THREE if processes == 3 else LAYOUTS | MORE
    for name, (size, settings) in chosen.items():
        if size == processes:
            model = model_for(settings) + (("train.batch=12",) if processes == 3 else ())
            layout = tuple(parallel_words(settings))
            found[name] = Case(layout, (*ADAMW, *model))
            found[f"{name}, modern"] = Case(layout, (*MODERN, *model), packed=True)
    return found | (OPTIMIZERS if processes == 2 else {})


def curves(port: int, cases: list[tuple[tuple[str, ...], bool]]) -> list[Curve]:
    part_from_crowd(port)
    found = [run(words, packed=packed, steps=STEPS) for words, packed in cases]
    assert isinstance(dist.group.WORLD, StagedGroup)
    return found


@cache
def alone(words: tuple[str, ...], packed: bool) -> Curve:
    return run(words, packed=packed, steps=STEPS)


def compare(crowd: Crowd, cases: dict[str, Case], *, processes: int) -> None:
    """All cases in the same processes, and each in one process here."""
    asked = [(case.words(alone=False), case.packed) for case in cases.values()]
    answers = crowd(processes, curves, free_port("127.0.0.1"), asked)
    wrong = []
    for (name, case), *found in zip(cases.items(), *answers, strict=True):
        expected = alone(case.words(alone=True), case.packed)
        off = [abs(a - b) for a, b in zip(found[0]["losses"], expected["losses"], strict=True)]
        norm = abs(found[0]["norms"][0] / expected["norms"][0] - 1)
        print(f"{name}: losses off by {max(off):.1e}, the first norm by {norm:.1e}")
        try:
            assert all(curve == found[0] for curve in found), "all processes know the same"
            if case.format is HALF:
                assert found[0]["losses"] == pytest.approx(expected["losses"], abs=case.far)
            else:
                assert_close(found[0], expected, far=case.far)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_every_layout_computes_what_one_process_does(crowd: Crowd, processes: int) -> None:
    compare(crowd, cases_of(processes), processes=processes)


def test_compiled_blocks_in_bf16(crowd: Crowd) -> None:
    compare(crowd, COMPILED, processes=2)


WORKERS = [
    ("parallel.gossip.topology=ring",),
    ("parallel.gossip.topology=complete", "parallel.exchange.send=bf16"),
    ('parallel.local.every="2 steps"', "parallel.exchange.delay=0"),
]


def workers(port: int, words: tuple[str, ...]) -> list[Curve]:
    part_from_crowd(port)
    return [run((*words, *how, SHARED), packed=False, steps=STEPS) for how in WORKERS]


def test_workers_compute_what_those_on_the_cpu_do(crowd: Crowd) -> None:
    """Each has weights of its own, so one process is no measure."""
    onto, host = (*ADAMW, *EAGER, *EXACTLY), (*ADAMW, 'runtime.device="cpu"')
    found, expected = (crowd(2, workers, free_port("127.0.0.1"), words) for words in (onto, host))
    for mine, theirs in zip(found, expected, strict=True):
        for how, curve, wanted in zip(WORKERS, mine, theirs, strict=True):
            assert curve["losses"] == pytest.approx(wanted["losses"], abs=1e-3), how
            assert curve["validation"] == pytest.approx(wanted["validation"], abs=2e-3), how


# ------------------------------------------------------------------ stops


def first_halves(port: int, pairs: list[tuple[RunConfig, RunConfig]]) -> list[int]:
    part_from_crowd(port)
    return wholes_and_halves(pairs)


def other_halves(port: int, configs: list[RunConfig]) -> list[int]:
    part_from_crowd(port)
    return all_go_on(configs, None)


GOES_ON = ("copies of shards", "shards and tensor", "ring", "pipeline", "soap")


def test_the_same_layout_goes_on_to_the_bit(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs
) -> None:
    layouts = {name: EXACT["4 processes"][name] for name in GOES_ON}
    # A stop is heard some steps later where results are read late.
    longer = 'train.until="9 steps"'
    pairs = exact_pairs(make_run, layouts, (*EAGER, *EXACTLY, SHARED, longer))
    stopped = crowd(4, first_halves, free_port("127.0.0.1"), pairs)
    assert stopped == [[int(Exit.STOPPED)] * len(layouts)] * 4
    halves = [half for _, half in pairs]
    done = crowd(4, other_halves, free_port("127.0.0.1"), halves)
    assert done == [[int(Exit.DONE)] * len(layouts)] * 4
    for name in layouts:
        runs.assert_same(tmp_path / f"{name}, whole", tmp_path / f"{name}, halves")


def each_a_step(port: int, configs: list[RunConfig]) -> list[int]:
    part_from_crowd(port)
    return all_go_on(configs, 1)


def test_a_run_moves_from_layout_to_layout(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs
) -> None:
    """A step each, or what it takes until all have heard of the stop; the first and the last in one
    process, which reads what the others wrote."""
    layouts = ("dp_shard=2", "tp=2", "cp=2", 'pp=2 schedule="interleaved"')
    steps = ('train.until="20 steps"', 'validate.every="1 steps"')
    settings = (*RESUMED, *steps, *EAGER, *EXACTLY)
    Run(make_run(*settings, folder="whole")).train()
    moving = [
        make_run(*settings, *parallel_words(layout), SHARED, folder="moving") for layout in layouts
    ]
    go_on(make_run(*settings, folder="moving"), 1)
    answers = crowd(2, each_a_step, free_port("127.0.0.1"), moving)
    assert answers == [[int(Exit.STOPPED)] * len(layouts)] * 2
    go_on(make_run(*settings, folder="moving"), None)
    whole, moved = (
        [line for line in runs.history(tmp_path / name) if line["kind"] in ("step", "validation")]
        for name in ("whole", "moving")
    )
    assert len(moved) == 20 + 21
    for expected, line in zip(whole, moved, strict=True):
        assert (line["step"], line["samples"]) == (expected["step"], expected["samples"])
        assert line["loss"] == pytest.approx(expected["loss"], abs=2e-5)
    said = (tmp_path / "moving" / "train.log").read_text()
    assert said.count("which 2 processes share, exchanging through host memory") == len(layouts)


# ------------------------------------------------------------------ refused


def begun_without_leave(port: int, config: RunConfig) -> list[str | int]:
    part_from_crowd(port)
    try:
        Run(config).train()
    except UserError as error:
        return [int(error.exit), str(error)]
    return [0, f"{ProcessInfo.current().rank} trained"]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="they would have a GPU each")
def test_processes_of_a_launcher_are_refused_before_nccl_is(
    crowd: Crowd, make_run: MakeRun
) -> None:
    for status, said in crowd(2, begun_without_leave, free_port("127.0.0.1"), make_run(*EAGER)):
        assert status == Exit.CONFIG
        assert "need a GPU each, and see 1 GPU" in said and "parallel.share_gpu = true" in said


def test_the_command_refuses_before_it_starts_any(
    gristmill: Callable[..., Any], run_text: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(run_text())
    count = torch.cuda.device_count()
    words = ("train", tmp_path / "run.toml", f"--processes={count + 1}", *EAGER)
    ended = gristmill(*words)
    assert ended.returncode == Exit.CONFIG
    assert f"{count + 1} processes need a GPU each, and this machine has {count}" in ended.stderr
    assert "parallel.share_gpu=true" in ended.stderr
    assert not (tmp_path / "run").exists()
