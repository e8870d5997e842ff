"""All commands with their summaries and examples, without importing typer: completion is fast."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """A command whose module is not imported yet."""

    import_path: str
    """MODULE:NAME, with a module in `cli/` and a function or group in it."""
    summary: str
    """The first paragraph of its help."""


VERBS = {
    "demo": Verb(
        "demo:demo",
        "Run the whole pipeline on this machine, offline: text, tokenizer, training, report.",
    ),
    "new": Verb(
        "new:new",
        "Write a run file that fits this machine and your text, and say what to do next.",
    ),
    "prepare": Verb(
        "prepare:prepare",
        "Turn text into token files that `train` reads.",
    ),
    "tokens": Verb(
        "tokens:tokens",
        "Inspect, verify, convert and merge token files.",
    ),
    "tokenizer": Verb(
        "tokens:tokenizer",
        "Train tokenizers, and try them on text.",
    ),
    "train": Verb(
        "train:train",
        "Train a model, or resume the run in the folder.",
    ),
    "plan": Verb(
        "plan:plan",
        "Will it fit, how fast will it be, what will it cost, and in which layout.",
    ),
    "translate": Verb(
        "translate:translate",
        "Translate the command line of another program into a run file or a Gristmill command.",
    ),
    "launch": Verb(
        "launch:launch",
        "Run on a cluster: Slurm, PBS, MPI, Kubernetes or Ray. `launch RUN.toml --on slurm` "
        "submits; see `launch submit --help`.",
    ),
    "replay": Verb(
        "inspect:replay",
        "Compute a step of a run again, to tell a faulty device from a bad batch.",
    ),
    "bench": Verb(
        "bench:bench",
        "Measure the speed of a run's training step and show where its time goes.",
    ),
    "evaluate": Verb(
        "evaluate:evaluate",
        "Measure loss, perplexity and bits per byte on text, and scores on tasks.",
    ),
    "generate": Verb(
        "models:generate",
        "Continue a text with a model, or converse with it.",
    ),
    "serve": Verb(
        "serve:serve",
        "Serve models over HTTP with OpenAI's interface, and a page to talk to them.",
    ),
    "export": Verb(
        "models:export",
        "Write a Hugging Face folder that `transformers` loads, or a GGUF file for llama.cpp.",
    ),
    "import": Verb(
        "models:import_checkpoint",
        "Make a model folder from a checkpoint of nanoGPT, Megatron-LM or Megatron-DeepSpeed.",
    ),
    "report": Verb(
        "inspect:report",
        "Write one HTML page with the curves of a run, or a comparison of several.",
    ),
    "watch": Verb(
        "watch:watch",
        "Show all runs on one page while they train: curves, events, samples, time left.",
    ),
    "config": Verb(
        "inspect:config",
        "Print the complete settings of a run and the values derived from them.",
    ),
    "doctor": Verb(
        "inspect:doctor",
        "Show what this machine has for training, and what is wrong with it.",
    ),
}

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": (
        "gristmill demo",
        "gristmill demo --steps 2000 --folder runs/longer",
    ),
    "new": (
        "gristmill new books/",
        "gristmill new books/ --hours 8 -o books.toml",
        "gristmill new tokens/books --preset modern-small",
        "gristmill new books/ train.seed=7 name=second",
    ),
    "prepare": (
        "gristmill prepare books/ 'web/*.parquet' -o tokens/mine",
        "gristmill prepare crawl.jsonl.gz -o tokens/crawl --split 999,1 -t bytes",
        "gristmill prepare openwebtext -o 'data/openwebtext/{split}'",
        "gristmill prepare 's3://bucket/crawl/*.jsonl.gz' -o s3://bucket/tokens/crawl",
        "gristmill prepare crawl/ -o tokens/crawl --filter gopher,c4,fineweb "
        "--decontaminate hellaswag",
        "gristmill prepare crawl/ -o tokens/crawl --parts 64 --engine local",
        "gristmill prepare crawl/ -o tokens/crawl --parts 8    (a task of a job array)",
    ),
    "tokens": (
        "gristmill tokens inspect tokens/mine",
        "gristmill tokens convert tokens/mine -o tokens/npy/mine --format npy",
    ),
    "tokenizer": (
        "gristmill tokenizer train books/ -o tokenizer -n 16384",
        "gristmill tokenizer show tokenizer 'The miller grinds.'",
    ),
    "tokenizer train": ("gristmill tokenizer train books/ -o tokenizer -n 16384",),
    "tokenizer show": ("gristmill tokenizer show tokenizer 'The miller grinds.'",),
    "train": (
        "gristmill train run.toml    (starts, or resumes)",
        "gristmill train run.toml optim.lr=1e-3 name=hotter",
        "gristmill train run.toml train.until='20B tokens'    (trains for longer)",
        "gristmill train run.toml --processes 8",
        "gristmill train run.toml --from 4000    (resumes from an earlier checkpoint)",
    ),
    "plan": (
        "gristmill plan run.toml --gpu h100-80gb --gpus 16",
        "gristmill plan run.toml --gpu h100-80gb --gpus 16 --hours 48 --write",
        "gristmill plan runs/mine --what 3",
    ),
    "translate": (
        "gristmill translate megatron -- pretrain_gpt.py --num-layers 24 --bf16",
        "gristmill translate nanogpt -- train.py config/train_gpt2.py",
    ),
    "launch": (
        "gristmill launch submit run.toml --on slurm",
        "gristmill launch submit run.toml --on slurm --dry-run",
        "gristmill launch status runs/mine",
    ),
    "launch status": ("gristmill launch status runs/mine",),
    "launch logs": ("gristmill launch logs runs/mine --lines 50",),
    "launch cancel": ("gristmill launch cancel runs/mine",),
    "replay": (
        "gristmill replay runs/mine 1200",
        "gristmill replay runs/mine 1200 runtime.device=cpu",
    ),
    "bench": (
        "gristmill bench run.toml",
        'gristmill bench run.toml train.micro_batch=32 precision.fp8=\'["mlp", "attention"]\'',
    ),
    "evaluate": (
        "gristmill evaluate runs/mine",
        "gristmill evaluate runs/mine gpt2 --data tokens/val --tasks lambada,hellaswag",
    ),
    "generate": (
        "gristmill generate runs/mine 'Once upon a time' --tokens 200",
        "gristmill generate runs/chat --chat",
    ),
    "serve": (
        "gristmill serve runs/mine",
        "gristmill serve runs/mine runs/chat --port 8080",
    ),
    "export": (
        "gristmill export runs/mine exported",
        "gristmill export runs/mine model.gguf",
    ),
    "import": (
        "gristmill import ckpt.pt -o imported",
        "gristmill import checkpoints/iter_0100000 -o imported",
    ),
    "report": (
        "gristmill report runs/mine",
        "gristmill report runs/one runs/other -o compared.html",
    ),
    "watch": (
        "gristmill watch",
        "gristmill watch runs /shared/runs --port 8010",
    ),
    "config": (
        "gristmill config run.toml optim.lr=1e-3",
        "gristmill config --presets",
        "gristmill config --schema > gristmill.schema.json",
    ),
    "doctor": (
        "gristmill doctor",
        "gristmill doctor --cluster --json cluster.json",
    ),
}
"""Examples at the end of the help of a verb, or of a command of a group, with comments in
parentheses."""

PLACEHOLDERS = {
    "--budget": "DOLLARS",
    "--checkpoint": "CHECKPOINT",
    "--data": "NAME",
    "--device": "DEVICE",
    "--end-of-text": "TOKEN",
    "--folder": "FOLDER",
    "--gpu": "KIND",
    "--link": "NETWORK",
    "--output": "FILE.html",
    "--price": "DOLLARS",
    "--step": "STEP",
    "--stop": "TEXT",
    "--system": "TEXT",
    "--tasks": "TASKS",
    "--text": "SOURCE",
}
"""Placeholders in the help for option values without a metavar of their own; integers are N, floats
X."""

FIRST_STEPS = """\
Text in, language model out.

  try it            gristmill demo                    all steps on this machine, in minutes
  train on text     gristmill new TEXT                writes NAME.toml for this machine and text
                    gristmill prepare TEXT …          as `new` prints it
                    gristmill train NAME.toml         the same command resumes
  watch it          gristmill watch                   all runs on one live page
  talk to it        gristmill generate runs/NAME      in the terminal
                    gristmill serve runs/NAME         in the browser, and with OpenAI's interface
  use a cluster     gristmill launch NAME.toml --on slurm

gristmill --help lists all verbs, gristmill VERB --help describes one.
"""
"""What `gristmill` alone prints."""
