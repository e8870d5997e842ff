"""How command lines and files of other programs are read: what is unknown, wrong or hostile."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.cli.translate import translate_run
from gristmill.config.load import load_text
from gristmill.dialects.table import load_table
from gristmill.dialects.translate import Translation, split_overrides, translate
from gristmill.dialects.words import split_launcher

SMALL = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "4"),
    *("--train-iters", "6", "--lr", "1e-3", "--data-path", "tokens/a"),
)


def megatron(*words: str) -> Translation:
    return translate(load_table("megatron"), [*SMALL, *words])


def settings(made: Translation) -> dict[str, object]:
    return {one.path: one.value for one in made.settings}


def refusal(*words: str, table: str = "megatron") -> str:
    with pytest.raises(UserError) as raised:
        translate(load_table(table), [*(SMALL if table == "megatron" else ()), *words])
    return str(raised.value)


# ------------------------------------------------------------------ unknown, refused, contradictory


def test_an_unknown_option_names_the_nearest() -> None:
    shown = refusal("--num-layer-s", "3", "--lr-decay-itres", "4", "--zzz")
    assert "--num-layer-s: pretrain_gpt.py has no such option" in shown
    assert "did you mean --num-layers" in shown
    assert "did you mean --lr-decay-iters" in shown
    assert "see the page about this dialect" in shown


def test_a_beginning_of_a_name() -> None:
    assert settings(megatron("--clip", "0.5"))["train.clip"] == 0.5
    assert "may stand for --lr-decay-style, --lr-decay-iters" in refusal("--lr-decay", "4")


def test_a_refused_option_says_what_to_do_instead() -> None:
    shown = refusal("--num-experts", "8", "--moe-router-topk", "2", "--fp8-format", "e4m3")
    assert "--num-experts 8: mixtures of experts are not trained here\n    leave it out" in shown
    assert "--fp8-format e4m3: gradients are in e5m2 here, and everything else in e4m3" in shown
    assert "--moe-router-topk" not in shown


def test_fp8_is_that_of_blocks() -> None:
    assert settings(megatron("--bf16", "--fp8-format", "hybrid", "--fp8-margin", "0"))[
        "precision.fp8"
    ] == ["mlp", "attention"]
    assert "add --bf16" in refusal("--fp8-format", "hybrid")


def test_families_are_ignored_with_a_reason() -> None:
    made = megatron("--moe-router-topk", "2", "--rl-profile", "--overlap-grad-reduce",
                    "--high-priority-stream-groups", "a", "b")  # fmt: skip
    ignored = [str(one) for one in made.ignored]
    assert any(one.startswith("--moe-router-topk 2: only mixtures of experts") for one in ignored)
    assert any(one.startswith("--rl-profile: only reinforcement learning") for one in ignored)
    assert "--high-priority-stream-groups a b: it is about speed only" in ignored


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--fp16", "--bf16"), "--fp16 and --bf16 exclude one another"),
        (("--train-samples", "100"), "--train-iters and --train-samples exclude one another"),
        (("--lr-decay-samples", "9"), "the run is counted in steps"),
        (("--lr-warmup-iters", "2", "--lr-warmup-fraction", "0.1"), "exclude one another"),
        (("--vocab-file", "a/vocab.json"), "is one of a tokenizer's two files"),
        (("--load", "a", "--no-load-optim"), "go on with its optimizer state"),
        (("--no-position-embedding",), "models here know positions"),
        (("--step-batch-size-schedule", "0:8 1M:16 3M:24"), "by equal amounts"),
        (("--step-batch-size-schedule", "0:x"), "this is no schedule of batches"),
        (("--optimizer", "sgd", "--decoupled-lr", "1e-3"), "SGD has one learning rate"),
        (("--zero-stage", "3", "--use-distributed-optimizer"), "asks for another sharding"),
        (("--train-data-path", "x"), "--data-path and --train-data-path exclude one another"),
        (("--rampup-batch-size", "2", "2", "10"), "a ramp is counted in samples"),
        (("--pad-vocab-size-to", "100", "--tensor-model-parallel-size", "8"), "cannot be divided"),
        (("--position-embedding-type", "alibi"), "learned or rotary positions"),
        (("--optimizer", "muon"), "is not known"),
        (("--finetune",), "not in a folder of their own"),
    ],
)  # fmt: skip
def test_options_that_contradict(words: tuple[str, ...], shown: str) -> None:
    assert shown in refusal(*words)


def test_what_asks_for_what_is_done_in_any_case() -> None:
    made = megatron("--dataloader-type", "single", "--exp-avg-dtype", "fp32")
    assert [one.option for one in made.ignored] == [
        "--dataloader-type single",
        "--exp-avg-dtype fp32",
    ]
    assert "read once in order" in refusal("--dataloader-type", "cyclic")


def test_a_repeated_option() -> None:
    made = megatron("--lr", "2e-3", "--lr=3e-3", "--clip-grad", "1.0", "--clip-grad", "1.0")
    assert settings(made)["optim.lr"] == 3e-3
    repeated = [str(one) for one in made.changed if "times" in one.text]
    assert repeated == ["--lr=3e-3: given 3 times; the last one counts"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--num-layers", "two"), "'two' is not a whole number"),
        (("--num-layers", "9" * 30), "is not a whole number below 2^63"),
        (("--num-layers", "9" * 6000), "is not a whole number below 2^63"),
        (("--lr", "nan"), "'nan' is not a finite number"),
        (("--lr", "1e999"), "is not a finite number"),
        (("--lr",), "--lr: needs a value"),
        (("--rampup-batch-size", "1", "2"), "needs 3 values"),
        (("--fp16=1",), "takes no value"),
        (("--fp16", "yes"), "'yes' belongs to no option"),
        (("-x",), "no such option"),
        (("--", "a"), "belongs to no option"),
        (("--fp16", ""), "belongs to no option"),
        (("--save", "a\0b"), "not UTF-8 text"),
        (("--save", "a\udcff"), "not UTF-8 text"),
        (("--[a-z]*", "1"), "no such option"),
    ],
)
def test_wrong_values(words: tuple[str, ...], shown: str) -> None:
    assert shown in refusal(*words)


HOSTILE = [
    'a"b', "a'b", "a\nname = 'x'\n[model]", "a\r\n# x", "a\x1b[31m", "a # b", "{x}", "$(id)",
    "`id`", "a'\n\\", "a;b", "a=b", "optim.lr=9", "../../etc", "ünïcode", "\u2028x",
    "\u202ex", " a ", "-1", "a\tb",
    "\\", "a\\nb", '"""', "'''", "[x]", "%s", "\x7f", "\x01",
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_stay_values(value: str) -> None:
    made = megatron("--save", value, "--wandb-project", value, "--data-cache-path", value)
    read = tomllib.loads(made.text)
    assert read["folder"] == value
    assert read["track"]["wandb"]["project"] == value
    assert read["data"]["cache"] == value
    assert read["optim"]["lr"] == 1e-3
    assert all(line.isprintable() for line in made.text.split("\n"))


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_of_our_own_words(value: str) -> None:
    table = load_table("megatron-prepare")
    words = translate(table, ["--input", value, "--output-prefix", value]).words
    at = words.index("--")
    assert words[at + 1 :] == [value]
    assert f"--output={value}" in words[:at]


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_in_a_printed_command(value: str) -> None:
    table = load_table("megatron-prepare")
    text = translate(table, ["--input", value, "--output-prefix", value]).text
    assert all(line.isprintable() for line in text.split("\n"))
    (line,) = (line for line in text.splitlines() if line.startswith("gristmill"))
    script = f"set -- {line}; printf '%s\\0' \"$@\""
    shown = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    words = shown.stdout.decode().split("\0")
    assert words[-2] == value
    assert f"--output={value}" in words


def test_all_that_is_wrong_is_told_at_once() -> None:
    shown = refusal("--num-experts", "8", "--use-mup", "--fp16", "--bf16")
    assert shown.count("\n    ") >= 3


# ------------------------------------------------------------------ what stands before


@pytest.mark.parametrize(
    "before",
    [
        "python pretrain_gpt.py",
        "python3.11 -u /opt/Megatron-LM/pretrain_gpt.py",
        "torchrun --nproc_per_node 8 pretrain_gpt.py",
        "deepspeed --num_gpus 4 ./pretrain_gpt.py",
        "CUDA_DEVICE_MAX_CONNECTIONS=1 srun -l torchrun pretrain_gpt.py",
        "pretrain_gpt.py",
    ],
)
def test_a_launcher_is_left_out(before: str) -> None:
    table = load_table("megatron")
    made = translate(table, [*before.split(), *SMALL])
    order = "megatron-deepspeed" if before.startswith("deepspeed") else "megatron"
    assert settings(made) == {**settings(megatron()), "data.order": order}
    assert made.ignored[0].option == before


@pytest.mark.parametrize(
    "words",
    [["--save", "pretrain_gpt.py"], ["bash", "pretrain_gpt.py"], [], ["A=b"], ["python", "b.py"]],
)
def test_only_a_launcher_is_left_out(words: list[str]) -> None:
    assert split_launcher(load_table("megatron"), words) == ((), words)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("nanogpt-prepare", "data/shakespeare_words/prepare.py"),
        ("nanogpt-prepare", "python prepare.py"),
        ("nanogpt-prepare", "python /data/prepare.py"),
        ("decentralized-prepare", "python data/shakespeare_char/prepare.py"),
        ("xla-gpt2-prepare", "python scripts/prepare_c4.py --seed 3"),
        ("megatron", "torchrun --nproc_per_node 8 pretrain_bert.py --num-layers 2"),
        ("nanogpt", "python sample.py --start=x"),
    ],
)
def test_another_script_is_refused(table: str, words: str) -> None:
    with pytest.raises(UserError, match=r"is no script of .* that is known here") as raised:
        translate(load_table(table), words.split())
    assert load_table(table).scripts[0] in str(raised.value)


@pytest.mark.parametrize("before", ["", "./", "/opt/nanoGPT/", "../nanoGPT/"])
@pytest.mark.parametrize("name", ["openwebtext", "shakespeare", "shakespeare_char"])
def test_a_script_is_known_by_its_path(name: str, before: str, tmp_path: Path) -> None:
    script = f"{before}data/{name}/prepare.py"
    found = settings(translate(load_table("nanogpt-prepare"), ["python", script]))
    folder = str(Path(script).parent)
    assert found.pop("--output") == f"{folder}/{{split}}"
    if name == "openwebtext":
        assert found == {"SOURCE": "openwebtext"}
        return
    assert found == {
        "SOURCE": "tinyshakespeare",
        "--tokenizer": "gpt2" if name == "shakespeare" else "characters",
        "--hold-out-end": 0.1,
        "--no-append-eod": True,
    }


def test_a_script_with_its_own_text(tmp_path: Path) -> None:
    (tmp_path / "data/shakespeare").mkdir(parents=True)
    (tmp_path / "data/shakespeare/input.txt").write_text("mine")
    script = str(tmp_path / "data/shakespeare/prepare.py")
    found = settings(translate(load_table("nanogpt-prepare"), [script]))
    assert found["SOURCE"] == str(tmp_path / "data/shakespeare/input.txt")


# ------------------------------------------------------------------ XLA


def xla_gpt2(words: str, *ours: str) -> Any:
    return translate_run("xla-gpt2", [*ours, *words.split()])


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ("PJRT_DEVICE=TPU python run_pretrain_xla.py --mp-start-method spawn", "xla"),
        ("python run_pretrain_xla.py --compile", "xla"),
        ("XLA_REGISTER_INSTALLED_PLUGINS=1 PJRT_DEVICE=TPU python run_pretrain_xla.py", "xla"),
        ("PJRT_DEVICE=CUDA GPU_NUM_DEVICES=2 python run_pretrain_xla.py --mixed-precision fp16",
         "cuda"),
        ("PJRT_DEVICE=CPU python ./run_pretrain_xla.py", "cpu"),
        ("PJRT_DEVICE=TPU python run_pretrain.py", "auto"),
        ("--seed 3", "auto"),
    ],
)  # fmt: skip
def test_the_variable_selects_the_device(words: str, device: str) -> None:
    made = xla_gpt2(words)
    assert made.config.runtime.device == device
    assert (made.config.runtime.compile is None) == (device == "xla")
    # The printed run file is one by itself.
    assert load_text(made.translation.text, place="run.toml") == made.config


def test_a_default_of_the_other_program_gives_way() -> None:
    """--compile was not given, so that our device is not refused because of it."""
    made = xla_gpt2("--seed 3", "runtime.device=xla")
    assert made.config.runtime.device == "xla" and made.config.runtime.compile is None
    with pytest.raises(UserError, match=r"--compile: runtime\.compile"):
        xla_gpt2("--compile", "runtime.device=xla")


def test_a_device_that_nobody_has() -> None:
    with pytest.raises(UserError, match="PJRT_DEVICE=NEURON: is no device"):
        xla_gpt2("PJRT_DEVICE=NEURON python run_pretrain_xla.py")


def test_activations_and_optimizers_of_pre_training_gpt2() -> None:
    table = load_table("xla-gpt2")
    found = settings(translate(table, "--activation relu --optim-type adam".split()))
    # Without weight decay, Adam and AdamW are the same.
    assert (found["model.activation"], found["optim.type"]) == ("relu", "adamw")
    words = "--optim-type adam --weight-decay 0.1"
    assert settings(translate(table, words.split()))["optim.type"] == "adam"
    assert "give gelu or relu" in refusal("--activation", "silu", table="xla-gpt2")


def test_variables_of_wandb_before_a_command() -> None:
    def made(variable: str, *words: str) -> Translation:
        return translate(load_table("nanogpt"), [variable, "python", "train.py", *words])

    found = settings(made("WANDB_MODE=offline", "--wandb_log=True"))
    assert (found["track.wandb.project"], found["track.wandb.mode"]) == ("owt", "offline")
    assert "track.wandb.project" not in settings(made("WANDB_MODE=disabled", "--wandb_log=True"))
    (remark,) = made("WANDB_ENTITY=me", "--wandb_log=True").changed
    assert str(remark).startswith("WANDB_ENTITY=me: W&B reads it from the environment")
    without = made("WANDB_MODE=offline")
    assert "track.wandb.mode" not in settings(without)
    assert str(without.ignored[-1]) == "WANDB_MODE=offline: nothing is sent to W&B"


def test_settings_without_a_table() -> None:
    for name in ("megatron", "nanogpt", "decentralized"):
        words = ["folder=runs/x", "name=mine", "optim.beta2=0.9", "run.toml"]
        assert split_overrides(load_table(name), words) == (words[:3], words[3:])
        assert split_overrides(load_table(name), ["foldr=x"]) == ([], ["foldr=x"])


def test_settings_of_ours_come_first() -> None:
    table = load_table("megatron")
    words = ["runtime.device=cpu", "optim.lr=1", "--save", "a.b=c"]
    assert split_overrides(table, words) == (words[:2], words[2:])
    toml = load_table("decentralized")
    assert split_overrides(toml, ["x.toml", "runtime.device=cpu"]) == (
        ["runtime.device=cpu"], ["x.toml"]
    )  # fmt: skip


# ------------------------------------------------------------------ nanoGPT's Python files


def nanogpt(text: str, tmp_path: Path, *words: str) -> Translation:
    file = tmp_path / "config.py"
    file.write_text(text, encoding="utf-8")
    return translate(load_table("nanogpt"), [str(file), *words])


def test_a_file_of_assignments(tmp_path: Path) -> None:
    text = '"""About."""\nbatch_size = 4  # a comment\ngradient_accumulation_steps = 5 * 8\n'
    made = nanogpt(text + "max_iters = 100\nlr_decay_iters = max_iters // 2\n", tmp_path)
    found = settings(made)
    assert found["train.batch"] == 160
    assert found["schedule.decay"] == "50 steps"


def test_words_replace_what_a_file_says(tmp_path: Path) -> None:
    found = settings(nanogpt("batch_size = 4\n", tmp_path, "--batch_size=6", "--compile=False"))
    assert (found["train.micro_batch"], found["runtime.compile"]) == (6, False)


def test_files_of_nanogpt(tmp_path: Path) -> None:
    """As config/finetune_shakespeare.py and config/eval_gpt2.py have it."""
    made = nanogpt(
        "import time\nwandb_log = True\nwandb_run_name = 'ft-' + str(time.time())\n", tmp_path
    )
    assert settings(made)["name"] == "ft"
    (remark,) = [one for one in made.changed if "wandb_run_name" in one.option]
    assert remark.text == "without the time, so that the run can be resumed"
    found = settings(nanogpt("eval_only = True\ninit_from = 'gpt2'\n", tmp_path))
    assert found["--validate-only"] is True
    assert (found["model.start"], found["folder"]) == ("gpt2", "out/gpt2")
    found = settings(nanogpt("out_dir = 'x-' + 'y'\n", tmp_path, "--eval_only=False"))
    assert (found["folder"], found["--validate-only"]) == ("x-y", False)


@pytest.mark.parametrize(
    "line",
    [
        "import time as t", "import time, os", "from time import time", "seed = time.time()",
        "out_dir = str(time.sleep(9))", "out_dir = str(time.time)", "out_dir = 'a' + 1",
        "out_dir = 1 + 'a'", "out_dir = 'a' - 'b'", "out_dir = str(open('x'))",
        "import os", "from os import system", "__import__('os').system('touch ran')",
        "out_dir = __import__('os').getcwd()", "out_dir = open('x').read()", "exec('x=1')",
        "out_dir = f'{1+1}'", "for x in range(3): pass", "batch_size: int = 4", "batch_size += 1",
        "a = b = 1", "out_dir = [x for x in ()]", "out_dir = (lambda: 1)()", "batch_size = 9**9**9",
        "batch_size = 1e29 * 1e29", "batch_size = 1 / 0", "out_dir = 'a' * 10", "print(1)",
        "x.y = 1",
        "del batch_size", "out_dir = unknown", "if True: batch_size = 3", "def f(): pass",
        "batch_size = -'a'", "batch_size = True + 1", "batch_size, block_size = 1, 2",
    ],
)  # fmt: skip
def test_a_file_that_would_run_code(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        nanogpt(f"max_iters = 5\n{line}\n", tmp_path)
    assert "config.py:2" in str(raised.value)
    assert not Path("ran").exists()


def test_text_that_doubles(tmp_path: Path) -> None:
    lines = ["out_dir = 'a' + 'a'", *(["out_dir = out_dir + out_dir"] * 60)]
    with pytest.raises(UserError, match="the text is too long"):
        nanogpt("\n".join(lines), tmp_path)


@pytest.mark.parametrize(
    "text", ["batch_size = (", "\0", "x = " + "(" * 5000, "x = " + "-" * 90000 + "1"]
)
def test_a_file_that_is_no_python(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        nanogpt(text, tmp_path)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--batch_size=a"], "must be a whole number"),
        (["--batch_size=True"], "must be a whole number"),
        (["--batch_size"], "write --name=value"),
        (["batch_size=3"], "is no option"),
        (["--batchsize=3"], "did you mean batch_size"),
        (["--learning_rate=1e999"], "finite number"),
        (["--learning_rate='fast'"], "must be a number"),
        (["--out_dir=3"], "must be text"),
        (["missing.py"], "cannot read the file"),
        (["--out_dir='a\\0b'"], "without NUL"),
        (["--max_iters=" + "9" * 40], "below 2^63"),
        (["--init_from=gpt3"], "is neither scratch, resume"),
        (["--device=tpu"], "is no device known here"),
        (["--dtype=int8"], "is no number format"),
    ],
)
def test_words_of_nanogpt(
    words: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown in refusal(*words, table="nanogpt")


# ------------------------------------------------------------------ TOML files


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[train]\nn_step = 3\n", "did you mean train.n_steps"),
        ("[train]\nseed = 'x'\n", "must be a whole number"),
        ("[train]\nbackend = 'x'\n", "is no backend"),
        ("[train]\ntopology = 'star'\nbackend = 'decentdp'\n", "one of complete, ring"),
        ("[train.optim]\nbetas = [0.9]\n", "must be a list of 2 values"),
        ("[train.optim]\nbetas = 0.9\n", "must be a list of 2 values"),
        ("checkpoint = 'model.pth'\n", "the same command resumes"),
        ("dataset = 'c4'\n", "openwebtext is the only choice"),
        ("train = 3\n", "no such option"),
        ("a = [", "not valid TOML"),
        ("log_dir = nan\n", "must be text"),
        ("[train.optim]\neps = inf\n", "finite number"),
    ],
)
def test_files_of_decentralized_gpt2(text: str, shown: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text, encoding="utf-8")
    assert shown in refusal(str(file), table="decentralized")


@pytest.mark.parametrize("words", [[], ["a.toml", "b.toml"], ["--lr", "3"], ["."], ["\0"]])
def test_no_file(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        translate(load_table("decentralized"), words)


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "large.toml"
    file.write_bytes(b"#" * (2 << 20))
    assert "too large" in refusal(str(file), table="decentralized")
