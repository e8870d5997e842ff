"""The commands of the guides on small sizes: data, training to a checkpoint, the same again."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli.main import app
from gristmill.cli.translate import translate_run
from gristmill.launch.processes import Job
from gristmill.text.sources.corpora import Corpus
from gristmill.text.tokenizers.training import train_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "dialects"
COMMANDS = tomllib.loads((GOLDEN / "commands.toml").read_text(encoding="utf-8"))
TEXTS = [
    f"Document {n}: the quick brown fox jumps over the lazy dog, {n * n} times." for n in range(200)
]
HERE = ("runtime.device=cpu", "runtime.threads=1")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def gristmill(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def small(name: str, **changes: str | None) -> list[str]:
    """A command of a guide with other values, or without an option."""
    words = shlex.split(COMMANDS[name]["words"])
    for option, value in changes.items():
        written = next(word for word in words if word.strip("-").replace("-", "_") == option)
        at = words.index(written)
        end = next((n for n in range(at + 1, len(words)) if words[n].startswith("--")), len(words))
        words[at:end] = [] if value is None else [written, *value.split()]
    return words


def write_texts(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": text, "id": str(n)}) for n, text in enumerate(TEXTS))
    Path(path).write_text("\n".join(lines) + "\n")


def write_gpt2_files() -> None:
    definition = json.loads(train_tokenizer(iter(TEXTS), vocab_size=400).definition or "")
    vocab = definition["model"]["vocab"] | {"<|endoftext|>": 399}
    Path("gpt2-vocab.json").write_text(json.dumps(vocab))
    merges = "".join(" ".join(pair) + "\n" for pair in definition["model"]["merges"])
    Path("gpt2-merges.txt").write_text("#version: 0.2\n" + merges)


def checkpoints(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder, "checkpoints").glob("step-*"))


def small_corpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few texts in the place of a corpus of many gigabytes."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet("texts/data.parquet")
    corpus = Corpus(
        name=name, title="small", homepage="-", licence="-", dataset="./texts", split="train",
        documents=len(TEXTS), held_out=0.05, seed=2357,
    )  # fmt: skip
    found: Any = lambda wanted: corpus if wanted == name else None  # noqa: E731
    monkeypatch.setattr("gristmill.text.sources.corpora.find_corpus", found)


MEGATRON_SIZES = {
    "num_layers": "2", "hidden_size": "16", "num_attention_heads": "2", "seq_length": "24",
    "max_position_embeddings": "24", "lr_decay_iters": "4", "lr_warmup_fraction": ".25",
    "log_interval": "1", "save_interval": "2", "eval_interval": "2", "eval_iters": "1",
}  # fmt: skip


def test_megatron_deepspeed() -> None:
    write_texts("my-corpus.json")
    write_gpt2_files()
    words = small("megatron-deepspeed-data", workers="1")
    assert "ignored: python tools/preprocess_data.py" in gristmill(
        "prepare", "--dialect", "megatron", "--", *words
    )
    assert Path("my-gpt2_text_document.idx").is_file()
    sizes = {**MEGATRON_SIZES, "fp16": None}
    words = small("megatron-deepspeed-345M", **sizes, train_iters="4")
    shown = gristmill("train", "--dialect", "megatron", *HERE, "--", *words)
    assert "changed: --eval-iters 1: every validation" in shown
    assert checkpoints("checkpoints/gpt2") == ["step-00000002", "step-00000004"]
    # The same command resumes, and a longer one trains further.
    again = gristmill("train", "--dialect", "megatron", *HERE, "--", *words)
    assert "the run is complete at step 4" in again
    longer = small("megatron-deepspeed-345M", **sizes, train_iters="6")
    gristmill("train", "--dialect", "megatron", *HERE, "--", *longer)
    assert checkpoints("checkpoints/gpt2")[-1] == "step-00000006"
    origin = Path("checkpoints/gpt2/origin.txt").read_text(encoding="utf-8")
    assert origin.count("# Megatron-LM and Megatron-DeepSpeed: deepspeed --num_gpus 1") == 3
    assert "layers = 2" in origin and "# --num-layers 2" in origin


def test_megatron_loads_from_another_folder_and_stops_at_intervals() -> None:
    """With the two files of a tokenizer by names of their own."""
    write_texts("my-corpus.json")
    write_gpt2_files()
    Path("gpt2-vocab.json").rename("some.vocabulary")
    Path("gpt2-merges.txt").rename("some.merges")
    files = {"merge_file": "some.merges", "vocab_file": "some.vocabulary"}
    words = small("megatron-deepspeed-data", workers="1", merge_file=files["merge_file"])
    words[words.index("--vocab") + 1] = files["vocab_file"]
    gristmill("prepare", "--dialect", "megatron", "--", *words)
    sizes = {**MEGATRON_SIZES, **files, "fp16": None, "train_iters": "4", "save": "first"}
    words = small("megatron-deepspeed-345M", **sizes, load="nowhere")
    said = gristmill("train", "--dialect", "megatron", *HERE, "--", *words, "--exit-interval", "3",
                     code=Exit.STOPPED)  # fmt: skip
    assert "checkpoint.load nowhere holds no checkpoint" in said
    assert checkpoints("first") == ["step-00000002", "step-00000003"]
    words = small("megatron-deepspeed-345M", **{**sizes, "save": "second"}, load="first")
    gristmill("train", "--dialect", "megatron", *HERE, "--", *words)
    assert checkpoints("second") == ["step-00000004"]
    assert checkpoints("first") == ["step-00000002", "step-00000003"]


IMPOSSIBLE = {
    "heads": ("megatron", ("--num-attention-heads", "7"), "--num-attention-heads 7: model.heads",
              "7 heads do not divide the width 16"),
    "length": ("megatron", ("--train-iters", "-5"), "--train-iters -5: train.until", "-5 steps"),
    "batch": ("megatron", ("--global-batch-size", "9"), "--global-batch-size 9", "batch 9"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_no_run_can_have_is_not_translated(case: str) -> None:
    dialect, more, *shown = IMPOSSIBLE[case]
    words = small("megatron-deepspeed-345M", **MEGATRON_SIZES)
    with pytest.raises(UserError) as caught:
        gristmill("translate", dialect, "--", *words, *more)
    assert all(text in str(caught.value) for text in shown)


def test_a_length_that_no_run_can_have_in_a_file() -> None:
    text = (GOLDEN / "decent-gpt2-small.toml").read_text(encoding="utf-8")
    Path("bad.toml").write_text(re.sub(r"(?m)^n_steps *=.*$", "n_steps = -5", text))
    with pytest.raises(UserError, match=r"bad\.toml: .*n_steps = -5"):
        gristmill("translate", "decentralized", "--", "bad.toml")


def test_a_model_that_is_not_here_does_not_keep_a_command_from_being_translated() -> None:
    words = small("megatron-deepspeed-345M", **MEGATRON_SIZES, load="elsewhere")
    assert 'start = "elsewhere"' in gristmill("translate", "megatron", "--", *words, "--finetune")
    with pytest.raises(UserError, match="--train-iters -5"):
        gristmill("translate", "megatron", "--", *words, "--finetune", "--train-iters", "-5")


def test_megatron_keys_and_several_inputs() -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_texts(name)
    write_gpt2_files()
    gristmill("prepare", "--dialect", "megatron", "--", "--input", "a.jsonl", "b.jsonl",
              "--output-prefix", "two", "--json-keys", "text", "id", "--workers", "1",
              "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "gpt2-vocab.json",
              "--merge-file", "gpt2-merges.txt")  # fmt: skip
    for key in ("text", "id"):
        manifest = json.loads(Path(f"two_{key}_document.json").read_text())
        assert manifest["documents"] == 2 * len(TEXTS)
    # Without --append-eod, documents end without a token of their own.
    assert 399 not in np.fromfile("two_text_document.bin", "<u2")


def test_decentralized_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    small_corpus("openwebtext", monkeypatch)
    gristmill("prepare", "--dialect", "decentralized", "--tokenizer", "bytes", "--")
    assert Path("data/openwebtext/val.bin").is_file()
    text = (GOLDEN / "decent-gpt2-small.toml").read_text(encoding="utf-8")
    values = {
        "wandb_log": "false", "global_batch_size": "4", "context_length": "16", "n_steps": "4",
        "compile": "false", "amp": "false", "eval_interval": "2", "eval_steps": "1",
        "n_layers": "2", "n_heads": "2", "n_embd": "16", "vocab_size": "264", "warmup_steps": "1",
    }  # fmt: skip
    for key, value in values.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
        assert count == 1, key
    Path("decent.toml").write_text(text)
    # One worker has nobody to average with.
    words = ("decent.toml", *HERE, "parallel.gossip=unset", "parallel.exchange=unset")
    lines = ("--log-format", "decentralized")
    shown = gristmill("train", "--dialect", "decentralized", *lines, *words)
    assert checkpoints("log/decent") == ["step-00000002", "step-00000004"]
    assert re.search(r"  INFO\] Initial train loss: \d\.\d+, val loss: \d\.\d+, step: 0\n", shown)
    assert re.search(r"  INFO\] Step {6}2, Val loss: \d\.\d+, Train loss: \d\.\d+, Train", shown)
    assert "INFO] Saved model to log/decent/checkpoints/step-00000002\n" in shown
    assert "INFO] info:" not in shown and "nan" not in shown


def test_llm_pytorch() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32}
    config = transformers.GPTNeoConfig(
        vocab_size=264, attention_types=[[["global", "local"], 1]], window_size=8, **sizes
    )
    transformers.GPTNeoForCausalLM(config).save_pretrained("gpt-neo-tiny")
    write_texts("wiki.json")
    words = small(
        "llm-pytorch-kfac", dataset_name=None, model_name_or_path="./gpt-neo-tiny",
        max_train_steps="4", checkpointing_steps="2", gradient_accumulation_steps="2",
        mixed_precision="no", kfac_factor_update_steps="1", kfac_inv_update_steps="2",
    )  # fmt: skip
    words += ["--train_file", "wiki.json", "--tokenizer_name", "bytes", "--block_size", "16",
              "--preprocessing_num_workers", "1"]  # fmt: skip
    shown = gristmill("train", "--dialect", "llm-pytorch", *HERE, "--", *words)
    assert "first: gristmill prepare wiki.json --output=tokens/wiki-bytes --split=95,5" in shown
    assert Path("tokens/wiki-bytes_val.bin").is_file()
    assert {"step-00000002", "step-00000004"} <= set(checkpoints("runs/gpt-neo-1.3B"))
    # What is there is not made again.
    translate_run("llm-pytorch", words).prepare(alone=False)


def test_pre_training_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    small_corpus("fineweb-10bt", monkeypatch)
    words = small("xla-gpt2-data", tokenizer="bytes", shard_size="5000", num_workers="1")
    gristmill("prepare", "--dialect", "xla-gpt2", "--split", "8,0,2", "--", *words)
    assert np.load("fineweb_10BT/train_000001.npy").dtype == np.uint16
    words = small(
        "xla-gpt2-124m", vocab_size="264", seq_length="16", d_model="16", num_layers="2",
        num_heads="2", d_ff="32", wandb_logging=None, warmup_steps="1", decay_steps="4",
        train_batch_size="4", eval_batch_size="2", gradient_accum_step="2", train_steps="4",
        valid_steps="2", valid_interval="2", save_interval="2",
    )  # fmt: skip
    gristmill("train", "--dialect", "xla-gpt2", *HERE, "data.tokenizer=bytes", "--", *words)
    assert checkpoints("checkpoints") == ["step-00000002", "step-00000004"]
    words = small("xla-gpt2-generate", model="checkpoints", max_new_tokens="4")
    shown = gristmill("generate", "--dialect", "xla-gpt2", "--device", "cpu", "--", *words)
    assert "ignored: --tokenizer gpt2" in shown


def test_nanogpt() -> None:
    text = "\n".join(TEXTS) + "é"
    Path("data/shakespeare_char").mkdir(parents=True)
    Path("data/shakespeare_char/input.txt").write_text(text)
    words = ["python", "data/shakespeare_char/prepare.py"]
    gristmill("prepare", "--dialect", "nanogpt", "--", *words)
    # Sorted characters, the first nine tenths and the rest.
    ids = [sorted(set(text)).index(character) for character in text]
    cut = int(len(text) * 0.9)
    for part, expected in (("train", ids[:cut]), ("val", ids[cut:])):
        assert np.fromfile(f"data/shakespeare_char/{part}.bin", "<u2").tolist() == expected
    Path("train_shakespeare_char.py").write_text((GOLDEN / "train_shakespeare_char.py").read_text())
    words = [
        "train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=1",
        "--log_interval=1", "--block_size=16", "--batch_size=4", "--n_layer=2", "--n_head=2",
        "--n_embd=16", "--max_iters=4", "--lr_decay_iters=4", "--dropout=0.0", "--warmup_iters=1",
        "--eval_interval=2",
    ]  # fmt: skip
    # As the words of nanoGPT are typed, without -- before them.
    ours = ("--dialect", "nanogpt", "runtime.threads=1", "folder=out")
    gristmill("train", *ours, *words)
    assert checkpoints("out") == ["step-00000002", "step-00000004"]
    shown = gristmill("train", *ours, *words, "--eval_only=True")
    assert "the same to the bit" in shown


def test_nanogpt_openwebtext(monkeypatch: pytest.MonkeyPatch) -> None:
    small_corpus("openwebtext", monkeypatch)
    gristmill("prepare", "--dialect", "nanogpt", "--tokenizer", "bytes", "--")
    assert np.fromfile("data/openwebtext/val.bin", "<u2")[-1] == 256


# ------------------------------------------------------------------ the commands themselves

WORDS = [
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16",
    "--max-position-embeddings", "16", "--micro-batch-size", "1", "--lr", "1e-3", "--train-iters",
    "4", "--data-path", "tokens/none", "--save", "run",
]  # fmt: skip


def test_processes_get_the_other_programs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Job] = []
    monkeypatch.setattr("gristmill.cli.train.supervise", lambda job: noted.append(job) or 75)
    words = ["train", "--dialect", "megatron", "--processes", "2", *HERE, "--", *WORDS]
    gristmill(*words, code=75)
    start = [
        sys.executable,
        "-m",
        "gristmill",
        "train",
        "--dialect=megatron",
        "--processes=2",
        "--",
    ]
    assert list(noted[0].command) == [*start, *HERE, *WORDS]
    assert noted[0].folder.path == Path("run")


def test_a_launcher_does_not_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("model").mkdir()
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    Path("model/config.json").write_text(json.dumps({**config, "vocab_size": 264}))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    words = ["--config_name", "model", "--tokenizer_name", "bytes", "--train_file", "a.txt",
             "--max_train_steps", "4", "--output_dir", "run", "--block_size", "16"]  # fmt: skip
    with pytest.raises(UserError, match=r"once, before: gristmill prepare a\.txt"):
        gristmill("train", "--dialect", "llm-pytorch", *HERE, "--", *words)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hidden-size", "15"], "--num-attention-heads 2: model.heads"),
        (["--num-layers", "0"], "--num-layers 0: model.layers"),
        (["--lr", "-1"], "--lr -1: optim.lr"),
        (["--split", "a,b,c"], "--split a,b,c: data.split"),
    ],
)
def test_errors_speak_of_the_other_programs_options(words: list[str], shown: str) -> None:
    with pytest.raises(UserError) as raised:
        gristmill("train", "--dialect", "megatron", "--", *WORDS, *words)
    assert shown in str(raised.value)
    assert raised.value.exit == Exit.CONFIG
    assert not Path("run").exists()


def test_an_option_that_is_missing() -> None:
    with pytest.raises(UserError) as raised:
        gristmill("train", "--dialect", "megatron", "--", *WORDS[2:])
    assert "--num-layers: model.layers: this setting is required" in str(raised.value)


def test_translate_prints_a_run_file() -> None:
    shown = gristmill("translate", "megatron", "--", *WORDS)
    assert tomllib.loads(shown)["model"]["layers"] == 2
    assert "layers = 2 " in shown and "# --num-layers 2" in shown
    assert gristmill("translate", "megatron", *WORDS) == shown
    listed = gristmill("translate")
    assert re.search(r"^xla-gpt2-prepare +scripts/prepare_fineweb.py$", listed, re.MULTILINE)
    with pytest.raises(UserError, match="add them to the printed run file"):
        gristmill("translate", "megatron", "--", "optim.lr=1", *WORDS)


def test_no_run_file() -> None:
    assert "Missing argument 'RUN.toml'" in gristmill("train", code=2)
    assert "No such option" in gristmill("train", "run.toml", "--fersh", code=2)
    assert "--dialect" in gristmill("prepare", "--dialect", "megatron", "--help")
