"""Every collective of a run through NCCL, as far as one GPU goes: groups of one process.

`Groups` makes no group for a single process, so that nothing is sent in an ordinary run. Here it
makes one, and all layouts that follow from groups then send, reduce and gather by themselves."""

from __future__ import annotations

import datetime
import gc
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from gristmill.base.process import ProcessInfo
from gristmill.base.units import Progress
from gristmill.bench.cluster.collectives import COLLECTIVES, _measure
from gristmill.bench.cluster.members import CheckContext, Member, nccl_version
from gristmill.bench.cluster.pairs import _receive, _send, _wait
from gristmill.config.load import load_text
from gristmill.config.parallel import Mesh
from gristmill.data.loader import JOINED, make_batch
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.device import Device
from gristmill.distributed.world import Groups, World
from gristmill.models.build import build_meta_model, build_model
from gristmill.strategies.context import heads_attention, ring_attention
from gristmill.strategies.data_parallel import sum_together
from gristmill.strategies.decentralized.codecs import Transfer, build_codec
from gristmill.strategies.matrix_exchange import ShardedMatrixExchange
from gristmill.strategies.sharding import ShardLayout
from gristmill.strategies.step import count_tokens
from gristmill.strategies.tensor import TensorParallelComm
from gristmill.train.build import build_strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
LIMIT = datetime.timedelta(seconds=77)
RUN = """
name = "one"
model = { layers = 2, heads = 2, width = 32, context = 32 }
data.paths = "none"
train = { until = "20 steps", batch = 8, seed = 5 }
optim = { lr = 1e-3, eps = 1e-4 }
precision = { tf32 = false, compute = "fp32" }
"""


class GroupsOfOne(Groups):
    """Makes a group for this process alone, along some of the axes."""

    def __init__(self, *axes: str) -> None:
        super().__init__(Mesh(), 0, timeout=LIMIT)
        self.axes = set(axes)

    def along(self, *axes: str) -> dist.ProcessGroup | None:
        return self.of([0]) if self.axes & set(axes) else None

    def of(self, ranks: list[int], **options: Any) -> dist.ProcessGroup | None:
        purpose = options.get("purpose", "tensors")
        key = (purpose, tuple(ranks))
        if key not in self._known:
            group = dist.new_group(
                ranks, timeout=self.timeout, backend=options.get("backend"), group_desc=purpose
            )
            assert group is not None
            self._known[key] = group
        return self._known[key]


class ShardedByOne(Mesh):
    """A mesh whose single process holds the only shard."""

    @property
    def shards_rows(self) -> bool:
        return True


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    dist.init_process_group(
        device().backend, store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT
    )
    yield
    gc.collect()
    dist.destroy_process_group()


def device() -> Device:
    return Device(torch.device(DEVICE, 0))


def everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def numbers(*shape: int) -> torch.Tensor:
    rng = np.random.default_rng(3)
    return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(DEVICE)


# ------------------------------------------------------------------ the groups


def test_the_limit_of_a_run_reaches_nccl() -> None:
    made = [everybody(), GroupsOfOne().of([0]), GroupsOfOne().of([0], purpose="other")]
    for group in made:
        assert group is not None
        dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
        backend: Any = group._get_backend(torch.device(DEVICE))
        assert backend.options._timeout == LIMIT
        assert backend.name() == "nccl"
    assert nccl_version()


def test_control_messages_stay_on_the_host() -> None:
    group = GroupsOfOne().of([0], purpose="control: test", backend="gloo")
    control = ControlGroup(group)
    assert control.all_gather({"a": 1}) == control.gather({"a": 1}) == [{"a": 1}]
    assert control.broadcast([2]) == [2] and control.any(True) and not control.any(False)
    assert control.on_rank0(lambda: 3) == 3 and control.on_all_ranks(lambda: 4) == [4]
    control.barrier()


# ------------------------------------------------------------------ single collectives


@pytest.mark.parametrize("name", list(COLLECTIVES))
@pytest.mark.parametrize("size", [4096, 2**24])
def test_collectives_are_right(name: str, size: int) -> None:
    member = Member(0, 0, "here", DEVICE, None, {})
    context = CheckContext(World(device(), ProcessInfo()), ControlGroup(), [member])
    found = _measure(context, COLLECTIVES[name], everybody(), size)
    assert (found["wrong"], found["bytes"]) == (0, size) and found["seconds"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_reductions(dtype: torch.dtype) -> None:
    group = everybody()
    x = (8 * numbers(513)).to(dtype)
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        y = x.clone()
        work = dist.all_reduce(y, operation, group=group, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(y, x)
    y = x.clone()
    dist.reduce(y, group=group, group_dst=0)
    assert torch.equal(y, x)


def test_reductions_that_only_nccl_has() -> None:
    x, y = numbers(64), numbers(64)
    dist.all_reduce(y, dist.ReduceOp.AVG, group=everybody())
    assert torch.equal(y, x)
    # FSDP2 divides so where its factor is not the number of processes.
    from torch.distributed import _make_nccl_premul_sum

    dist.all_reduce(y, _make_nccl_premul_sum(0.5), group=everybody())
    torch.testing.assert_close(y, 0.5 * x)


def test_messages_to_oneself() -> None:
    x, y = numbers(1000), torch.zeros(1000, device=DEVICE)
    dist.all_reduce(torch.ones(1, device=DEVICE))
    _wait([_send(x, 0, everybody()), _receive(y, 0, everybody())])
    assert torch.equal(x, y)


def test_collectives_that_start_together() -> None:
    from torch.distributed import _coalescing_manager

    tensors = [numbers(100), numbers(7)]
    before = [one.clone() for one in tensors]
    with _coalescing_manager(everybody(), torch.device(DEVICE), async_ops=True) as manager:
        for one in tensors:
            dist.all_reduce(one, group=everybody())
    manager.wait()
    for one, was in zip(tensors, before, strict=True):
        assert torch.equal(one, was)


def test_sums_of_several_tensors() -> None:
    tensors = [numbers(3, 4), numbers(5)]
    before = [one.clone() for one in tensors]
    sum_together(tensors, everybody())
    for one, was in zip(tensors, before, strict=True):
        assert torch.equal(one, was)
    batch = make_batch(np.arange(66).reshape(2, 33) % 61, rules=JOINED)
    counted = count_tokens([batch], ranks=1, group=everybody(), device=torch.device(DEVICE))
    assert counted.item() == 64


# ------------------------------------------------------------------ tensor and context parallel


@pytest.mark.parametrize("sequence", [True, False])
def test_tensor_parallel_messages(sequence: bool) -> None:
    comm = TensorParallelComm(everybody(), sequence_parallel=sequence, dropout=True)
    x = numbers(2, 6, 4).requires_grad_()
    y = comm.reduce_from(3 * comm.copy_to(x))
    y.square().sum().backward()
    torch.testing.assert_close(y, 3 * x)
    torch.testing.assert_close(x.grad, 18 * x)
    flat = numbers(5, 4)
    assert torch.equal(comm.gather_features(flat), flat)
    assert torch.equal(comm.all_max(flat), flat) and torch.equal(comm.all_sum(flat), flat)
    with comm.distinct_rng():
        torch.rand(1, device=DEVICE)


@pytest.mark.parametrize("attention", [ring_attention, heads_attention])
def test_attention_over_a_ring_of_one(attention: Callable[..., torch.Tensor]) -> None:
    inputs = [numbers(2, 4, 16, 8).requires_grad_() for _ in range(3)]
    y = attention(*inputs, group=everybody(), scale=None)
    expected = scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    gradients = torch.autograd.grad(y.square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    torch.testing.assert_close(gradients, wanted, atol=1e-3, rtol=1e-3)


def test_positions_are_exchanged_for_heads() -> None:
    x = numbers(1, 3, 8)
    received = torch.ops.gristmill.exchange(x, everybody().group_name)
    assert torch.equal(received, x)


# ------------------------------------------------------------------ decentralized workers


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "top-k"])
def test_what_workers_send(name: Any, on_host: bool) -> None:
    codec, x = build_codec(name, density=1.0), numbers(1000)
    transfer = Transfer(codec, on_host)
    done = transfer.sum(x, everybody(), round_sum=True)
    assert torch.equal(done.total, done.own)
    if name == "top-k":  # a sign and one of two levels
        assert torch.equal(done.own.sign(), x.sign())
    else:
        torch.testing.assert_close(done.own, x, atol=0.05, rtol=0.01)
    if name in ("bf16", "int8"):
        chunks = transfer._sum_chunks(x, everybody(), round_sum=False)
        torch.testing.assert_close(chunks.total, chunks.own)


def test_waiting_for_others_can_be_interrupted() -> None:
    asked = []
    x = numbers(1000)
    y = Transfer(build_codec("fp32", 1.0), interrupt=lambda: asked.append(1)).all_reduce(
        x.clone(), everybody()
    )
    assert torch.equal(x, y)


# ------------------------------------------------------------------ whole steps


def train(words: list[str], world: World, steps: int = 4) -> tuple[list[float], dict[str, Any]]:
    """Losses of a few steps, and the weights after them."""
    config = load_text(RUN, [*words, f'runtime.device="{DEVICE}"'], place="one.toml")
    strategy: Any = build_strategy(config, vocab=61, world=world)
    start = build_model(config.model, vocab=61, device=torch.device("cpu"))
    start.initialise(1)
    with torch.no_grad():
        for name, one in strategy.parameters.items():
            rows = one.local.shape[0]
            one.local.copy_(start.get_parameter(name)[:rows])
    strategy.weights_changed()
    rng, progress, losses = np.random.default_rng(0), Progress(), []
    for _ in range(steps):
        batches = [make_batch(rng.zipf(1.3, (4, 33)) % 61, rules=JOINED) for _ in range(2)]
        result = strategy.update(strategy.accumulate(batches, progress))
        progress = progress.after(samples=result.samples, tokens=result.tokens)
        losses.append(result.loss.item())
    weights = {name: one.local.detach().cpu() for name, one in strategy.parameters.items()}
    strategy.close()
    return losses, weights


def alone() -> World:
    return World(device())


def with_groups(*axes: str, mesh: Mesh | None = None) -> World:
    return World(device(), ProcessInfo(), mesh or Mesh(), GroupsOfOne(*axes))


PLAIN = ["runtime.compile=false"]


@pytest.mark.parametrize(
    ("words", "world", "tolerance"),
    [
        ([], lambda: with_groups("dp_replicate"), 1e-6),
        (["runtime.compile=true"], lambda: with_groups("dp_replicate"), 1e-3),
        (["precision.compute=bf16"], lambda: with_groups("dp_replicate"), 1e-2),
        ([], lambda: with_groups("dp_shard", mesh=ShardedByOne()), 1e-4),
        (["precision.compute=bf16"], lambda: with_groups("dp_shard", mesh=ShardedByOne()), 1e-2),
        (["runtime.compile=blocks"], lambda: with_groups("dp_shard", mesh=ShardedByOne()), 1e-3),
        ([], lambda: with_groups("tp"), 1e-4),
        (["parallel.tp=2", "parallel.sequence=false"], lambda: with_groups("tp"), 1e-4),
        ([], lambda: with_groups("cp"), 1e-4),
        (["parallel.cp=2", "parallel.attention=heads"], lambda: with_groups("cp"), 1e-4),
        ([], lambda: with_groups("dp_replicate", "tp", "cp", "dp_shard"), 1e-4),
        (
            ["optim.preconditioner.type=kfac"],
            lambda: with_groups("dp_replicate"),
            1e-3,
        ),
    ],
)
def test_steps_with_groups_are_those_without(
    words: list[str], world: Callable[[], World], tolerance: float
) -> None:
    words = [*([] if any("compile" in word for word in words) else PLAIN), *words]
    alike = [word for word in words if not word.startswith("parallel.")]
    losses, weights = train(words, world())
    expected, wanted = train(alike, alone())
    assert losses == pytest.approx(expected, rel=tolerance)
    for name, value in weights.items():
        rows = value.shape[0]
        # What no token touches, such as the padding of a vocabulary, has no loss to agree on.
        difference = (value - wanted[name][:rows]).norm() / wanted[name].norm().clamp(min=1e-6)
        assert difference < 30 * tolerance, name


def test_matrices_are_exchanged() -> None:
    config = load_text(RUN, [], place="one.toml")
    model = build_meta_model(config.model, vocab=61)
    names = [name for name, one in model.named_parameters() if one.ndim == 2][:3]
    world = with_groups("dp_replicate")
    exchange = ShardedMatrixExchange(ShardLayout.of(model, world.mesh), world, names=names)
    shards = [numbers(*exchange.shape(name)) for name in names]
    whole = exchange.gather(names, shards)
    assert sorted(whole) == [0, 1, 2] and all(exchange.computes(name) for name in names)
    moments = [torch.zeros(3, device=DEVICE) for _ in names]
    back = exchange.scatter(names, {place: 2 * one for place, one in whole.items()}, moments)
    for place, one in enumerate(shards):
        assert torch.equal(whole[place], one) and torch.equal(back[place], 2 * one)


# ------------------------------------------------------------------ doctor


def test_doctor_on_the_only_gpu(
    gristmill: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = gristmill("doctor", "--cluster", "--processes", 1, "--json", "found.json")
    assert (tmp_path / "found.json").is_file(), done.stderr
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["complete"] and done.returncode == document["exit"]
    (member,) = document["members"]
    assert member["device"] == "cuda" and member["gpu"]["memory"] > 2**30
    assert member["versions"]["nccl"] and member["versions"]["driver"]
    (own,) = document["checks"]["devices"]["numbers"]
    assert own["flops"] > 1e12 and own["health"]["celsius"] > 0 and own["peer_access"]
    alone = gristmill("doctor")
    assert "NCCL" in alone.stdout and "driver" in alone.stdout


def test_two_processes_on_the_only_gpu_are_found(
    begin_gristmill: Callable[..., Any], tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        values = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = ("doctor", "--cluster", "--device", "cuda", "--folder", tmp_path)
        env = {**os.environ, **{name: str(value) for name, value in values.items()}}
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        started.append(begin_gristmill(*words, env=env))
    first, second = [process.end() for process in started]
    assert "rank 0 on" in first.stdout and "use the same GPU" in first.stdout, first.stderr
    assert first.returncode == 1 and second.returncode != 0
