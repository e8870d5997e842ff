"""The grid of processes that settings ask for, and what does not fit it."""

from __future__ import annotations

import pytest

from gristmill.base.errors import Problem, UserError
from gristmill.config.load import load_text
from gristmill.config.parallel import AXES, Mesh, ParallelConfig, build_mesh
from gristmill.config.resolve import resolve
from gristmill.config.rules import check_mesh

RUN = """
name = "mesh"
model = { layers = 4, heads = 4, width = 32, context = 32 }
data.paths = "tokens/none"
train = { until = "10 steps", batch = 16 }
"""


@pytest.mark.parametrize(
    ("settings", "processes", "sizes"),
    [
        ({}, 1, {}),
        ({}, 6, {"dp_replicate": 6}),
        ({"dp_shard": 2}, 8, {"dp_replicate": 4, "dp_shard": 2}),
        ({"dp_shard": "auto", "tp": 2}, 8, {"dp_shard": 4, "tp": 2}),
        ({"dp_shard": "auto"}, 1, {}),
        ({"tp": 8, "pp": 16}, 1536, {"tp": 8, "pp": 16, "dp_replicate": 12}),
        ({"dp_replicate": 2, "tp": "auto"}, 4, {"dp_replicate": 2, "tp": 2}),
    ],
)
def test_one_size_is_what_the_others_leave_over(
    settings: dict[str, object], processes: int, sizes: dict[str, int]
) -> None:
    mesh = build_mesh(ParallelConfig.model_validate(settings), processes)
    assert mesh == Mesh(**sizes)
    assert mesh.processes == processes


@pytest.mark.parametrize(
    ("settings", "processes", "words"),
    [
        ({"tp": 3}, 8, ["tp 3 asks for a multiple of 3 processes, and there are 8", "tp = 2"]),
        ({"dp_replicate": 2, "tp": 2}, 6, ["asks for 4 processes", "start 4", "tp = 3"]),
        ({"tp": 4}, 2, ["start 4 processes", "tp = 2"]),
        ({"tp": "auto", "pp": "auto"}, 4, ["pp and tp are both", "all but one"]),
    ],
)
def test_products_that_do_not_fit_name_sizes_that_would(
    settings: dict[str, object], processes: int, words: list[str]
) -> None:
    problem = build_mesh(ParallelConfig.model_validate(settings), processes)
    assert isinstance(problem, Problem)
    assert all(word in str(problem) for word in words), problem


def test_ranks_and_places() -> None:
    mesh = Mesh(pp=2, dp_replicate=1, dp_shard=3, cp=1, tp=2)
    places = [mesh.place(rank) for rank in range(12)]
    assert [mesh.rank(place) for place in places] == list(range(12))
    assert places[1] == {**dict.fromkeys(AXES, 0), "tp": 1}, "tp runs fastest"
    assert mesh.group(7, "tp") == [6, 7]
    assert mesh.group(7, "dp_shard", "tp") == [6, 7, 8, 9, 10, 11]
    assert mesh.group(7, "pp") == [1, 7]
    assert str(mesh) == "pp 2 x dp_shard 3 x tp 2" and str(Mesh()) == "one process"


def refusal(*words: str, processes: int) -> str:
    with pytest.raises(UserError) as error:
        check_mesh(load_text(RUN, words, place="mesh.toml"), processes=processes)
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "processes", "said"),
    [
        (["parallel.tp=3"], 3, ["3 does not divide the heads 4", "tp could be 1, 2, 4"]),
        (["parallel.tp=4", "model.kv_heads=2"], 4, ["the key and value heads 2"]),
        (["parallel.tp=4", "data.sequence=30"], 4, ["parallel.sequence: a sequence of 30"]),
        (["parallel.cp=3"], 3, ["3 does not divide half the sequence 16", "cp could be"]),
        (['parallel.attention="heads"', "parallel.cp=8"], 8, ["8 does not divide the heads 4"]),
        (["parallel.cp=2", "model.dropout=0.1"], 2, ["model.dropout: attention over divided"]),
        (["parallel.pp=3"], 3, ["3 does not divide the layers 4", "pp could be 1, 2, 4"]),
        (["parallel.pp=2"], 2, ["1f1b needs at least 2 micro-batches in a step, and there are 1"]),
        (
            ["parallel.pp=2", 'parallel.schedule="interleaved"', "train.accumulate=3"],
            2,
            ["batch 16 is not a multiple of accumulate 3"],
        ),
        (
            [
                "parallel.pp=2",
                'parallel.schedule="zero-bubble"',
                "train.accumulate=4",
                'train.recompute="full"',
            ],
            2,
            ["train.recompute: zero-bubble divides the backward pass"],
        ),
        (["parallel.pp=2", "parallel.dp_shard=2", 'parallel.keep="weights"'], 4, ["parallel.keep"]),
        ([], 3, ["batch 16 cannot be divided among 3 data-parallel processes", "15, 18"]),
        (["train.micro_batch=3"], 2, ["batch 16 is not a multiple of micro_batch 3"]),
        (["train.micro_batch=16"], 2, ["each process's 8 samples of batch 16"]),
    ],
)
def test_what_the_mesh_does_not_divide_is_refused_with_sizes_that_would_do(
    words: list[str], processes: int, said: list[str]
) -> None:
    text = refusal(*words, processes=processes)
    assert all(one in text for one in said), text


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ('parallel.keep="weights"', "has no effect without parallel.dp_shard"),
        ("parallel.sequence=true", "has no effect without parallel.tp"),
        ('parallel.attention="ring"', "has no effect without parallel.cp"),
        ('parallel.schedule="gpipe"', "has no effect without parallel.pp"),
        ("parallel.stages=2", "has no effect without parallel.pp"),
        ("train.recompute_every=2", "has no effect with recompute = 'none'"),
    ],
)
def test_settings_that_would_not_act_are_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_text(RUN, [word], place="mesh.toml")


def test_stages_fit_their_schedule() -> None:
    with pytest.raises(UserError, match="2 groups of layers on a device do not fit"):
        load_text(RUN, ["parallel.pp=2", "parallel.stages=2"], place="mesh.toml")
    config = load_text(RUN, ["parallel.pp=2", 'parallel.schedule="interleaved"'], place="mesh.toml")
    assert config.parallel.stages_each == 2


def test_numbers_of_a_run_on_a_mesh() -> None:
    config = load_text(RUN, ["train.micro_batch=2"], place="mesh.toml")
    one = resolve(config, vocab=50257)
    four = resolve(config, vocab=50257, mesh=Mesh(dp_shard=4, tp=2))
    assert (one.batch, one.accumulate, one.padded_vocab) == (16, 8, 50304)
    assert (four.batch, four.accumulate) == (16, 2)
    assert four.padded_vocab == 50432, "a multiple of 128 x tp, as in Megatron"
    assert four.steps == one.steps and four.samples == one.samples


def test_all_three_portions_may_be_given_for_several_processes() -> None:
    words = ["train.micro_batch=2", "train.accumulate=2"]
    config = load_text(RUN, words, place="mesh.toml")
    assert resolve(config, vocab=300, mesh=Mesh(dp_replicate=4)).accumulate == 2
    with pytest.raises(UserError, match="x 2 processes is 8, not batch 16"):
        check_mesh(config, processes=2)
