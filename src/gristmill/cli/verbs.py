"""All commands by name, and the few to begin with; known without typer, for the shell's sake."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """A command before its module is imported."""

    place: str
    """Its module below `cli/`, and the name of the function or group there."""
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
        "Train and try tokenizers.",
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
        "Print what the command of another program amounts to: a run file, or a command of ours.",
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
        "Print the complete settings of a run and the numbers that follow from them.",
    ),
    "doctor": Verb(
        "inspect:doctor",
        "Show what this machine has for training, and what is wrong with it.",
    ),
}

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

gristmill --help lists all verbs, gristmill VERB --help tells about one.
"""
"""What `gristmill` alone prints."""
