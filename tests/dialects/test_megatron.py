"""What Megatron's options mean together: lengths, batches, schedules, layouts, sizes."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.config.load import load_text
from gristmill.config.model import GPTConfig
from gristmill.config.optim import AdamWConfig, LinearSchedule, WarmupStableDecaySchedule
from gristmill.config.parallel import Mesh
from gristmill.config.resolve import Resolved, padded, resolve
from gristmill.config.schema import RunConfig
from gristmill.dialects.table import load_table
from gristmill.dialects.translate import translate
from gristmill.plan.arithmetic import count_parameters, norm_vectors

MODEL = {
    "--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4", "--seq-length": "32",
    "--max-position-embeddings": "32", "--micro-batch-size": "1", "--lr": "1e-3",
    "--data-path": "tokens/a",
}  # fmt: skip


def words(*more: str, **sizes: str) -> list[str]:
    given = MODEL | {f"--{name.replace('_', '-')}": value for name, value in sizes.items()}
    return [*(word for pair in given.items() for word in pair), *more]


def run(*more: str, **sizes: str) -> RunConfig:
    made = translate(load_table("megatron"), words(*more, **sizes))
    return load_text(made.text, place="translation")


def numbers(config: RunConfig, **mesh: int) -> Resolved:
    return resolve(config, vocab=50257, mesh=Mesh(**mesh))


# ------------------------------------------------------------------ sizes

SIZES = {
    "1.7": (24, 2304, 24), "3.6": (32, 3072, 30), "7.5": (32, 4096, 36), "18.4": (48, 6144, 40),
    "39.1": (64, 8192, 48), "76.1": (80, 10240, 60), "145.6": (96, 12288, 80),
    "310.1": (128, 16384, 96),
}  # fmt: skip
"""Billions of parameters, and heads, width and layers of each."""


def sized(billions: str, *more: str) -> RunConfig:
    heads, width, layers = map(str, SIZES[billions])
    return run(
        *("--train-samples", "146484375", "--global-batch-size", "288", *more),
        num_attention_heads=heads,
        hidden_size=width,
        num_layers=layers,
        seq_length="2048",
        max_position_embeddings="2048",
    )


@pytest.mark.parametrize("billions", SIZES)
def test_the_sizes_of_the_guide(billions: str) -> None:
    config = sized(billions)
    assert isinstance(config.model, GPTConfig)
    count = count_parameters(config.model, rows=padded(50257, config.model))
    # The guide's figures are those of a paper, whose formula leaves out a little.
    assert count / 1e9 == pytest.approx(float(billions), rel=0.005, abs=0.06)


def test_a_tensor_parallel_rank_of_the_guides_log() -> None:
    """> number of parameters on (tensor, pipeline) model parallel rank (4, 0): 941594624"""
    config = sized("7.5", "--tensor-model-parallel-size", "8")
    model, found = config.model, numbers(config, tp=8)
    assert isinstance(model, GPTConfig)
    assert found.padded_vocab == 51200
    whole = count_parameters(model, rows=found.padded_vocab)
    # Norms, positions and the biases of row-parallel layers are on every rank.
    norms = (2 * model.layers + 1) * norm_vectors(model)
    shared = norms + model.context * model.width + 2 * model.layers * model.width
    assert shared + (whole - shared) // 8 == 941_594_624
    assert (whole - shared) % 8 == 0


@pytest.mark.parametrize(
    ("more", "rows"),
    [((), 50304), (("--tensor-model-parallel-size", "4"), 50688),
     (("--make-vocab-size-divisible-by", "1"), 50257),
     (("--pad-vocab-size-to", "51200", "--tensor-model-parallel-size", "4"), 51200),
     (("--padded-vocab-size", "50432"), 50432)],
)  # fmt: skip
def test_the_padded_vocabulary(more: tuple[str, ...], rows: int) -> None:
    config = run("--train-iters", "3", *more)
    tp = config.parallel.tp
    assert isinstance(tp, int)
    assert numbers(config, tp=tp).padded_vocab == rows


# ------------------------------------------------------------------ length and batch


def test_steps_of_a_run_counted_in_samples() -> None:
    """iteration 1/ 508626, and train: 146484375 samples in the order, as in the guide's log."""
    found = numbers(sized("7.5"), dp_replicate=2)
    assert (found.steps, found.asked_samples) == (508_626, 146_484_375)
    assert (found.batch, found.accumulate) == (288, 144)


def test_a_batch_of_one_micro_batch_of_each_process() -> None:
    found = numbers(run("--train-iters", "3", micro_batch_size="4"), dp_replicate=8)
    assert (found.batch, found.micro_batch, found.accumulate) == (32, 4, 1)


def test_a_ramp() -> None:
    config = run("--train-samples", "4000", "--rampup-batch-size", "4", "4", "900",
                 "--global-batch-size", "16")  # fmt: skip
    ramp = numbers(config).ramp
    assert [ramp.batch_at(samples) for samples in (0, 299, 300, 600, 899, 900, 2000)] == [
        4, 4, 8, 12, 12, 16, 16
    ]  # fmt: skip


# ------------------------------------------------------------------ learning rate


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--train-iters", "9"), ("linear", "0 steps", None)),
        (("--train-iters", "9", "--lr-warmup-iters", "2", "--lr-decay-iters", "8"),
         ("linear", "2 steps", "8 steps")),
        (("--train-iters", "9", "--lr-warmup-fraction", ".25"), ("linear", 0.25, None)),
        (("--train-iters", "900", "--lr-warmup-fraction", ".01", "--lr-decay-iters", "800"),
         ("linear", "8 steps", "800 steps")),
        (("--train-samples", "900", "--lr-warmup-fraction", ".1", "--lr-decay-samples", "800",
          "--lr-decay-style", "cosine"), ("cosine", "80 samples", "800 samples")),
        (("--train-samples", "900", "--lr-warmup-samples", "50"), ("linear", "50 samples", None)),
        (("--train-tokens", "90000", "--lr-decay-tokens", "80000"),
         ("linear", "0 steps", "80k tokens")),
        (("--train-iters", "9", "--lr-decay-style", "constant"), ("constant", "0 steps", None)),
    ],
)  # fmt: skip
def test_schedules(more: tuple[str, ...], expected: tuple[Any, ...]) -> None:
    schedule = run(*more, "--global-batch-size", "10").schedule
    span = [getattr(schedule, name, None) for name in ("warmup", "decay")]
    shown = [one if one is None or isinstance(one, float) else str(one) for one in span]
    assert (schedule.type, *shown) == expected


def test_a_stable_rate_with_a_final_decay() -> None:
    found = run("--train-iters", "90", "--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "9",
                "--lr-wsd-decay-style", "minus_sqrt", "--min-lr", "1e-5").schedule  # fmt: skip
    kept = found.model_dump(mode="json")
    assert (kept["type"], kept["decay"], kept["shape"]) == (
        "warmup-stable-decay",
        "9 steps",
        "sqrt",
    )


WSD = ("--train-iters", "900", "--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "90")


@pytest.mark.parametrize(
    ("more", "shape", "end"),
    [((), "exponential", None), (("--lr-wsd-decay-style", "cosine"), "cosine", None),
     (("--lr-decay-iters", "800"), "exponential", "800 steps")],
)  # fmt: skip
def test_a_final_decay(more: tuple[str, ...], shape: str, end: str | None) -> None:
    schedule = run(*WSD, *more).schedule
    assert isinstance(schedule, WarmupStableDecaySchedule)
    assert (schedule.shape, str(schedule.decay)) == (shape, "90 steps")
    assert (None if schedule.end is None else str(schedule.end)) == end


def test_warm_ups_of_nothing() -> None:
    for more in (("--lr-warmup-samples", "0"), ("--lr-warmup-iters", "0")):
        schedule = run("--train-iters", "900", *more).schedule
        assert str(schedule.warmup) == "0 steps"
        both = run("--train-iters", "900", *more, "--lr-warmup-fraction", ".1").schedule
        assert both.warmup == 0.1


def test_iterations_of_megatrons_scheduler_are_full_batches() -> None:
    """Also while the batch grows; and a run that ends within a batch decays to its own end."""
    more = ("--train-iters", "500", "--global-batch-size", "40", "--lr-decay-iters", "400")
    more = (*more, "--step-batch-size-schedule", "0:8 32000:24 64000:40")
    config = run(*more, "--lr-warmup-fraction", ".01")
    assert isinstance(config.schedule, LinearSchedule)
    assert str(config.schedule.warmup) == "160 samples"
    assert str(config.schedule.decay) == "16k samples"
    ramp = numbers(config).ramp
    assert [ramp.batch_at(n) for n in (0, 999, 1000, 1999, 2000)] == [8, 8, 24, 24, 40]
    schedule = run("--train-samples", "905", "--global-batch-size", "10").schedule
    assert isinstance(schedule, LinearSchedule) and str(schedule.decay) == "905 samples"


def test_steps_of_the_batch_that_a_run_does_not_reach() -> None:
    config = run("--train-samples", "990", "--step-batch-size-schedule", "0:8", "32000:24")
    assert (config.train.batch, config.train.ramp) == (8, None)
    assert config.validation.windows == 800


@pytest.mark.parametrize("more", [(), ("--decoupled-min-lr", "4e-5")])
def test_decoupled_rates(more: tuple[str, ...]) -> None:
    lowest = ("--train-iters", "9", "--min-lr", "1e-5", "--decoupled-lr", "5e-4", *more)
    untied = run(*lowest, "--untie-embeddings-and-output-weights").optim
    assert isinstance(untied, AdamWConfig)
    floor = 4e-5 if more else 1e-5
    assert (untied.embedding_lr, untied.embedding_min_lr) == (5e-4, floor)
    assert (untied.head_lr, untied.head_min_lr) == (5e-4, floor)
    tied = run(*lowest).optim
    assert isinstance(tied, AdamWConfig)
    assert (tied.embedding_min_lr, tied.head_lr) == (floor, None)


# ------------------------------------------------------------------ the function


@pytest.mark.parametrize(
    ("more", "activation"),
    [((), "gelu_tanh"), (("--disable-bias-linear",), "gelu"), (("--no-bias-gelu-fusion",), "gelu"),
     (("--disable-bias-linear", "--openai-gelu"), "gelu_tanh"),
     (("--disable-bias-linear", "--squared-relu"), "relu2"),
     (("--disable-bias-linear", "--swiglu"), "swiglu")],
)  # fmt: skip
def test_gelu_is_exact_where_megatron_does_not_fuse_it(
    more: tuple[str, ...], activation: str
) -> None:
    model = run("--train-iters", "9", *more).model
    assert isinstance(model, GPTConfig) and model.activation == activation


def test_rates_of_dropout() -> None:
    model = run("--train-iters", "9", "--attention-dropout", "0").model
    assert isinstance(model, GPTConfig)
    assert (model.dropout, model.attention_dropout) == (0.1, 0.0)
    model = run("--train-iters", "9", "--attention-dropout", "0", "--hidden-dropout", "0").model
    assert isinstance(model, GPTConfig)
    assert (model.dropout, model.attention_dropout) == (0.0, None)


def test_options_that_change_nothing_here() -> None:
    rope = ("--position-embedding-type", "rope", "--no-position-embedding")
    more = ("--apply-layernorm-1p", "--test-mode", "--no-load-rng", "--no-load-optim")
    config = run("--train-iters", "9", *rope, *more, "--rotary-interleaved")
    assert isinstance(config.model, GPTConfig) and config.model.positions == "rotary"


# ------------------------------------------------------------------ data and folders


@pytest.mark.parametrize(
    ("more", "order"),
    [((), "megatron"), (("--zero-stage", "1"), "megatron-deepspeed"),
     (("--checkpoint-activations",), "megatron-deepspeed")],
)  # fmt: skip
def test_whose_order_of_samples(more: tuple[str, ...], order: str) -> None:
    made = translate(load_table("megatron"), words("--train-iters", "3", *more))
    assert load_text(made.text, place="translation").data.order == order
    assert ("data.order=megatron" in made.text) == (order != "megatron")


def test_the_two_files_of_a_tokenizer() -> None:
    files = ("--vocab-file", "a/encoder.json", "--merge-file", "b/bpe.txt")
    data = run("--train-iters", "3", *files).data
    assert (data.tokenizer, data.merges) == ("a/encoder.json", "b/bpe.txt")
    files = ("--vocab-file", "a/gpt2-vocab.json", "--merge-file", "a/gpt2-merges.txt")
    data = run("--train-iters", "3", *files).data
    assert (data.tokenizer, data.merges) == ("a", None)


@pytest.mark.parametrize(
    ("more", "split"),
    [((), "969,30,1"), (("--split", "949,50,1"), "949,50,1"), (("--split", "98,2"), "98,2,0"),
     (("--split", "949:50:1"), "949,50,1"), (("--split", "98/ 2"), "98,2,0"),
     (("--split", "100,0,0"), "100,0,0"), (("--eval-iters", "0"), "969,0,31"),
     (("--eval-iters", "0", "--split", "100,0,0"), "100,0,0")],
)  # fmt: skip
def test_splits(more: tuple[str, ...], split: str) -> None:
    assert run("--train-iters", "3", *more).data.split == split


def test_validation() -> None:
    more = ("--train-iters", "3", "--global-batch-size", "6", "--eval-iters", "5")
    assert run(*more).validation.windows == 30
    assert run(*more, "--eval-global-batch-size", "2").validation.windows == 10


def test_several_token_sets() -> None:
    def paths(*given: str) -> Any:
        more = (*words("--train-iters", "3"), "--data-path", *given)
        made = translate(load_table("megatron"), more)
        return load_text(made.text, place="translation").data.paths

    assert paths("a", "b") == ("a", "b")
    assert paths("1", "a", "3", "b") == {"a": 1.0, "b": 3.0}
    assert paths("1", "a", "3", "a") == {"a": 4.0}
    assert paths("a") == "a"


def test_loss_scales() -> None:
    more = ("--fp16", "--initial-loss-scale", "4096", "--hysteresis", "3")
    more = (*more, "--loss-scale-window", "500", "--min-loss-scale", "2")
    scale = run("--train-iters", "3", *more).precision.loss_scale
    assert scale is not None
    assert (scale.initial, scale.minimum, scale.window, scale.hysteresis) == (4096, 2, 500, 3)
    static = run("--train-iters", "3", "--fp16", "--loss-scale", "128").precision.loss_scale
    assert static is not None
    assert (static.initial, static.minimum) == (128, 128)


def test_folders_and_checkpoints() -> None:
    more = ("--save", "runs/a/", "--load", "runs/a", "--save-interval", "5")
    more = (*more, "--save-retain-interval", "50")
    names = ("--wandb-project", "p", "--wandb-exp-name", "my run")
    config = run("--train-iters", "3", *more, *names)
    assert (config.name, config.folder) == ("my-run", "runs/a/")
    assert (str(config.checkpoint.every), str(config.checkpoint.keep_every)) == (
        "5 steps",
        "50 steps",
    )
    assert config.track.wandb is not None and config.track.wandb.project == "p"
    assert config.checkpoint.load is None


def test_a_folder_to_load_from() -> None:
    more = ("--train-iters", "3", "--save", "runs/a", "--load", "runs/b", "--exit-interval", "2")
    config = run(*more)
    assert (config.folder, config.checkpoint.load, config.model.start) == ("runs/a", "runs/b", None)
    assert str(config.train.exit_every) == "2 steps"
    scheduler = "--use-checkpoint-opt_param-scheduler"
    made = translate(load_table("megatron"), words(*more, scheduler))
    assert f"{scheduler}: a resumed run follows its present settings" in made.text
    entity = run(*more, "--wandb-project", "p", "--wandb-entity", "e").track.wandb
    assert entity is not None and entity.entity == "e"


# ------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--use-distributed-optimizer",), ("auto", "gradients")),
        (("--zero-stage", "1"), ("auto", "gradients")),
        (("--zero-stage", "2"), ("auto", "weights")),
        (("--zero-stage", "3"), ("auto", "nothing")),
        (("--zero-stage", "0"), (1, None)),
        (("--use-torch-fsdp2",), ("auto", "nothing")),
        (("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads"),
         ("auto", "weights")),
        ((), (1, None)),
    ],
)  # fmt: skip
def test_sharding(more: tuple[str, ...], expected: tuple[Any, ...]) -> None:
    parallel = run("--train-iters", "3", *more).parallel
    assert (parallel.dp_shard, parallel.keep) == expected


@pytest.mark.parametrize(
    "more",
    [("--num-layers-per-virtual-pipeline-stage", "2"),
     ("--num-virtual-stages-per-pipeline-rank", "2")],
)  # fmt: skip
def test_virtual_stages(more: tuple[str, ...]) -> None:
    config = run("--train-iters", "3", "--pipeline-model-parallel-size", "2",
                 "--global-batch-size", "8", *more, num_layers="8")  # fmt: skip
    assert (config.parallel.stages, config.parallel.schedule) == (2, "interleaved")
