"""The grid of processes that settings ask for, and what does not fit it."""

from __future__ import annotations

import re

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
        ({"tp": 3}, 8, "tp 3 asks for a multiple of 3 processes, and there are 8"),
        ({"dp_replicate": 2, "tp": 2}, 6, "dp_replicate 2 x tp 2 asks for 4 processes, and there"),
        ({"tp": "auto", "pp": "auto"}, 4, 'pp and tp are both "auto"'),
    ],
)
def test_sizes_that_do_not_multiply_to_the_processes_have_no_mesh(
    settings: dict[str, object], processes: int, words: str
) -> None:
    problem = build_mesh(ParallelConfig.model_validate(settings), processes)
    assert isinstance(problem, Problem)
    assert words in problem.what


def test_sizes_that_are_given_are_known_without_the_processes() -> None:
    settings = {"tp": 2, "cp": "auto", "pp": 3}
    assert build_mesh(ParallelConfig.model_validate(settings)) == Mesh(tp=2, pp=3)


def test_ranks_and_places() -> None:
    mesh = Mesh(pp=2, dp_replicate=1, dp_shard=3, cp=1, tp=2)
    places = [mesh.place(rank) for rank in range(12)]
    assert [mesh.rank(place) for place in places] == list(range(12))
    assert places[1] == {**dict.fromkeys(AXES, 0), "tp": 1}, "tp runs fastest"
    assert mesh.group(7, "tp") == [6, 7]
    assert mesh.group(7, "dp_shard", "tp") == [6, 7, 8, 9, 10, 11]
    assert mesh.group(7, "pp") == [1, 7]
    assert str(mesh) == "pp 2 x dp_shard 3 x tp 2" and str(Mesh()) == "one process"


def refusal(*words: str, processes: int) -> UserError:
    with pytest.raises(UserError) as error:
        check_mesh(load_text(RUN, words, place="mesh.toml"), processes=processes)
    return error.value


@pytest.mark.parametrize(
    ("words", "processes", "said"),
    [
        (["parallel.tp=3"], 3, ["3 does not divide the heads 4", "tp could be 1, 2, 4"]),
        (["parallel.tp=4", "model.kv_heads=2"], 4, ["the key and value heads 2", "1, 2"]),
        (
            ["parallel.tp=3", "model.mlp_width=301"],
            3,
            ["3 does not divide the heads 4, nor the inner width 301", "tp could be 1\n"],
        ),
        (["parallel.tp=2", "model.mlp_width=301"], 2, ["the inner width 301", "tp could be 1\n"]),
        (
            ["parallel.tp=3", "parallel.sequence=true"],
            3,
            ["3 does not divide the heads 4", "tp could be 1, 2, 4"],
        ),
        (
            ['parallel.tp="auto"'],
            8,
            ["8 does not divide the heads 4", "tp could be 1, 2, 4"],
        ),
        (
            ["parallel.tp=4"],
            6,
            [
                "tp 4 asks for a multiple of 4 processes, and there are 6",
                "start 4 or 8 processes\n",
            ],
        ),
        (["parallel.tp=4"], 2, ["start 4 processes\n"]),
        (
            ["parallel.dp_replicate=2", "parallel.tp=2"],
            8,
            ["dp_replicate 2 x tp 2 asks for 4 processes", "start 4 processes\n"],
        ),
        (["parallel.tp=4"], 18, ["and there are 18", "start 16 or 20 processes\n"]),
        (['parallel.tp="auto"', 'parallel.pp="auto"'], 4, ["pp and tp are both", "all but one"]),
        (["parallel.tp=4", "data.sequence=30"], 4, ["parallel.sequence: a sequence of 30"]),
        (["parallel.cp=3"], 3, ["3 does not divide half the sequence 16", "cp could be"]),
        (
            ['parallel.attention="heads"', "parallel.cp=8"],
            8,
            ["8 does not divide the heads 4", "1, 2, 4"],
        ),
        (
            ['parallel.attention="heads"', "parallel.cp=4", "parallel.tp=2"],
            8,
            ["cp 4 x tp 2 = 8 does not divide the heads 4", "cp could be 1, 2, or set"],
        ),
        (["parallel.cp=2", "data.sequence=31"], 2, ["data.sequence: a sequence of 31", "even"]),
        (["parallel.cp=2", "model.dropout=0.1"], 2, ["model.dropout: context-parallel attention"]),
        (
            ["parallel.cp=2", "model.attention_dropout=0.1"],
            2,
            ["model.attention_dropout: context-parallel attention"],
        ),
        (["parallel.pp=3"], 3, ["3 does not divide the layers 4", "pp could be 1, 2, 4"]),
        (
            ["parallel.pp=2", 'parallel.schedule="interleaved"', "parallel.stages=3"],
            2,
            ["parallel.stages: pp 2 x stages 3 = 6 does not divide the layers 4", "could be 2\n"],
        ),
        (
            ["parallel.pp=4", 'parallel.schedule="interleaved"'],
            4,
            ["parallel.pp: pp 4 x stages 2 = 8 does not divide the layers 4", "could be 1, 2\n"],
        ),
        (
            ["parallel.pp=2", 'parallel.schedule="interleaved"', "model.layers=5"],
            2,
            ["change model.layers"],
        ),
        (
            ["parallel.pp=2"],
            2,
            [
                "1f1b needs at least 2 micro-batches in a step, not 1",
                "train.micro_batch could be 2, 4, 8",
            ],
        ),
        (
            ["parallel.pp=4", "train.accumulate=2"],
            4,
            ["at least 4 micro-batches in a step, not 2", "accumulate could be 4, 8, 16"],
        ),
        (
            ["parallel.pp=2", "train.accumulate=1", "train.micro_batch=16"],
            2,
            ["set train.accumulate = 2 and train.micro_batch = 8"],
        ),
        (
            ["parallel.pp=2", 'parallel.schedule="interleaved"', "train.batch=3"],
            2,
            ["a multiple of 2 micro-batches", "could be 2, 4, 6, with train.micro_batch = 1\n"],
        ),
        (
            [
                "parallel.pp=2",
                'parallel.schedule="interleaved"',
                "train.batch=12",
                "train.micro_batch=4",
            ],
            2,
            ["micro-batches in a step, not 3", "train.micro_batch could be 2, 3, 6\n"],
        ),
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
            ["train.recompute: zero-bubble splits the backward pass"],
        ),
        (["parallel.pp=2", "parallel.dp_shard=2", 'parallel.keep="weights"'], 4, ["parallel.keep"]),
        ([], 3, ["batch 16 cannot be divided among 3 data-parallel processes", "15, 18"]),
        (["train.micro_batch=4"], 3, ["among 3 data-parallel processes", "could be 12, 24, 36"]),
        (['precision.reduce="bf16"'], 1, ["precision.reduce: has no effect with one process"]),
        (
            ['precision.reduce="bf16"', "parallel.tp=2"],
            2,
            ["precision.reduce: has no effect with tp 2", "remove it"],
        ),
        (["train.micro_batch=3"], 2, ["batch 16 is not a multiple of micro_batch 3"]),
        (["train.micro_batch=16"], 2, ["each process's 8 samples of batch 16"]),
    ],
)
def test_what_the_mesh_does_not_divide_is_refused_with_sizes_that_would_do(
    words: list[str], processes: int, said: list[str]
) -> None:
    error = refusal(*words, processes=processes)
    text = f"{error}\n"
    assert all(one in text for one in said), text
    assert len(error.problems) == 1


@pytest.mark.parametrize("words", [["parallel.dp_shard=2"], ["parallel.cp=2"], []])
def test_gradients_that_are_summed_may_have_a_format(words: list[str]) -> None:
    config = load_text(RUN, [*words, 'precision.reduce="bf16"'], place="mesh.toml")
    assert check_mesh(config, processes=2).processes == 2


ADVICE = re.compile(r"([a-z_.]+) could be ((?:\d+, )*\d+)")


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (["parallel.tp=3"], None),
        (["parallel.tp=3", "parallel.sequence=true", "model.kv_heads=2"], None),
        (["parallel.cp=8", 'parallel.attention="heads"', "parallel.tp=2"], None),
        (["parallel.pp=2", 'parallel.schedule="zero-bubble"', "parallel.stages=5"], None),
        (["parallel.pp=8", "parallel.cp=2"], None),
        (['parallel.tp="auto"'], 8),
        (["parallel.pp=2", 'parallel.schedule="zero-bubble"', "train.batch=12"], 4),
        (["parallel.pp=4", "train.batch=24", "train.micro_batch=6"], 8),
        (["parallel.pp=4", "train.accumulate=2"], 8),
        (["train.micro_batch=4"], 3),
    ],
)
def test_a_suggested_value_settles_what_was_refused(
    words: list[str], processes: int | None
) -> None:
    """Every value that is named, whether the file is refused or the number of processes."""
    ((setting, remedy),) = refused(words, processes).items()
    found = ADVICE.findall(remedy)
    assert found, remedy
    for name, values in found:
        dotted = name if "." in name else f"{setting.partition('.')[0]}.{name}"
        for value in values.split(", "):
            assert setting not in refused([*words, f"{dotted}={value}"], processes)


@pytest.mark.parametrize("processes", [1, 2, 6, 18])
def test_a_suggested_number_of_processes_has_a_mesh(processes: int) -> None:
    remedy = refused(["parallel.tp=4"], processes)["parallel"]
    for count in re.findall(r"\d+", remedy):
        assert "parallel" not in refused(["parallel.tp=4"], int(count))


def refused(words: list[str], processes: int | None) -> dict[str, str]:
    """Settings that are refused, each with its remedy."""
    try:
        config = load_text(RUN, words, place="mesh.toml")
        if processes is not None:
            check_mesh(config, processes=processes)
    except UserError as error:
        return {
            (problem.where or "").rpartition(": ")[2]: problem.remedy or ""
            for problem in error.problems
        }
    return {}


def test_what_no_number_of_processes_would_mend_is_refused_when_the_file_is_read() -> None:
    with pytest.raises(UserError) as error:
        load_text(RUN + "parallel = { tp = 3, cp = 3, pp = 3 }", place="mesh.toml")
    assert [problem.where for problem in error.value.problems] == [
        "mesh.toml:6: parallel.tp",
        "mesh.toml:6: parallel.cp",
        "mesh.toml:6: parallel.pp",
    ]
    assert load_text(RUN + 'parallel.tp = "auto"', place="mesh.toml").parallel.tp == "auto"


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
    with pytest.raises(UserError, match=said) as error:
        load_text(RUN, [word], place="mesh.toml")
    assert len(error.value.problems) == 1
    assert "remove it, or " in str(error.value), "only one of two was given"


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
