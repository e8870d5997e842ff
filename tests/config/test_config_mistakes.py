"""A table of wrong run files and what the user is told about each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.config.load import load_run, load_text

BASE = """\
name = "trial"
preset = "gpt2-nano"

[data]
paths = "tokens/books"

[train]
until = "100 steps"
batch = 12
"""

DURATION = 'write "500 steps", "1M samples" or "20B tokens"'
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": 64,
    "vocab_size": 300,
}


def complaint(text: str, words: tuple[str, ...] = ()) -> UserError:
    with pytest.raises(UserError) as caught:
        load_text(text, words, place="run.toml")
    return caught.value


def test_a_setting_that_is_a_switch_or_a_word_has_one_complaint() -> None:
    error = complaint(BASE, ('runtime.compile="bloks"',))
    assert len(error.problems) == 1
    assert "runtime.compile: input should be True, False or 'blocks'" in str(error)


def test_the_shortest_patience_is_accepted() -> None:
    words = ("parallel.timeout=5s", "parallel.start_timeout=0.1m")
    assert load_text(BASE, words, place="run.toml").parallel.timeout == "5s"


def test_the_base_of_the_table_is_right() -> None:
    assert load_text(BASE, place="run.toml").name == "trial"


# ------------------------------------------------------------------ lines added to the file

# The added text begins on line 10.
ADDED = {
    "typo in a key": (
        "[optim]\nlrr = 1e-3",
        "run.toml:11: optim.lrr: there is no such setting\n    did you mean lr?",
    ),
    "typo in a key of a union table": (
        '[schedule]\ntype = "cosine"\nwarmpu = 0.1',
        "run.toml:12: schedule.warmpu: there is no such setting\n    did you mean warmup?",
    ),
    "typo in a table": (
        "[modle]\nlayers = 2",
        "run.toml:11: modle: there is no such setting\n    did you mean model?",
    ),
    "typo in a nested table": (
        '[precision]\ncompute = "fp16"\n[precision.loss_scale]\nwindw = 3',
        "run.toml:13: precision.loss_scale.windw: there is no such setting\n"
        "    did you mean window?",
    ),
    "key of another table": (
        "weight_decay = 0.1",
        "run.toml:10: train.weight_decay: there is no such setting\n"
        "    did you mean optim.weight_decay?",
    ),
    "nothing like it": (
        "zzz = 1",
        "run.toml:10: train.zzz: there is no such setting\n    known here: until, batch, ",
    ),
    "key of another schedule": (
        '[schedule]\ntype = "cosine"\npower = 2.0',
        "run.toml:12: schedule.power: there is no such setting\n",
    ),
    "text for a number": (
        '[optim]\nlr = "fast"',
        "run.toml:11: optim.lr: input should be a valid number (it is 'fast')\n"
        "    Peak learning rate.",
    ),
    "number in quotes": (
        '[model]\nlayers = "4"',
        "run.toml:11: model.layers: input should be a valid integer (it is '4')\n",
    ),
    "number for text": (
        "[track.wandb]\nproject = 7",
        "run.toml:11: track.wandb.project: input should be a valid string (it is 7)\n",
    ),
    "decimal for a count": (
        "[model]\nheads = 4.0",
        "run.toml:11: model.heads: input should be a valid integer (it is 4.0)\n",
    ),
    "truth value for a count": (
        "[model]\nlayers = true",
        "run.toml:11: model.layers: input should be a valid integer (it is True)\n",
    ),
    "number for a truth value": (
        "[model]\ntie_head = 1",
        "run.toml:11: model.tie_head: input should be a valid boolean (it is 1)\n",
    ),
    "list for text": (
        "[model]\nstart = []",
        "run.toml:11: model.start: input should be a valid string (it is [])\n",
    ),
    "text in a list": (
        '[sample]\nevery = "10 steps"\nprompts = ["once", 3]',
        "run.toml:12: sample.prompts.1: input should be a valid string (it is 3)",
    ),
    "empty list": (
        '[sample]\nevery = "10 steps"\nprompts = []',
        "run.toml:12: sample.prompts: ",
    ),
    "zero layers": (
        "[model]\nlayers = 0",
        "run.toml:11: model.layers: input should be greater than or equal to 1 (it is 0)\n",
    ),
    "rate of zero": (
        "[optim]\nlr = 0.0",
        "run.toml:11: optim.lr: input should be greater than 0 (it is 0.0)\n",
    ),
    "infinite rate": (
        "[optim]\nlr = inf",
        "run.toml:11: optim.lr: input should be a finite number (it is inf)\n",
    ),
    "beta of one": (
        "[optim]\nbeta2 = 1.0",
        "run.toml:11: optim.beta2: input should be less than 1 (it is 1.0)\n",
    ),
    "negative seed": (
        "seed = -1",
        "run.toml:10: train.seed: input should be greater than or equal to 0 (it is -1)\n",
    ),
    "one checkpoint kept": (
        "[checkpoint]\nkeep = 1",
        "run.toml:11: checkpoint.keep: input should be greater than or equal to 2 (it is 1)\n"
        "    How many of the newest to keep; at least 2",
    ),
    "unknown choice": (
        '[precision]\ncompute = "fp8"',
        "run.toml:11: precision.compute: input should be 'auto', 'fp32', 'bf16' or 'fp16' "
        "(it is 'fp8')\n",
    ),
    "unknown optimizer": (
        '[optim]\ntype = "lion"',
        "run.toml:11: optim.type: there is no type 'lion'\n"
        "    one of 'adamw', 'adam', 'sgd', 'muon', 'accum-adamw', 'accum-adam'",
    ),
    "unknown schedule": (
        '[schedule]\ntype = "cosinus"',
        "run.toml:11: schedule.type: there is no type 'cosinus'\n    one of 'constant', ",
    ),
    "interval without a unit": (
        "[checkpoint]\nevery = 10",
        'run.toml:11: checkpoint.every: needs a unit: write "15m", "500 steps", "1M samples" or '
        '"20B tokens" (it is 10)\n    How often: a wall-clock span',
    ),
    "interval in quotes without a unit": (
        '[checkpoint]\nevery = "10"',
        'run.toml:11: checkpoint.every: \'10\' is not an interval; write "15m", "2h", "500 steps",',
    ),
    "interval in hours": (
        '[validate]\nevery = "2 hours"',
        "run.toml:11: validate.every: '2 hours' is not a duration; ",
    ),
    "interval of nothing": (
        '[validate]\nevery = "0 steps"',
        "run.toml:11: validate.every: must be at least 1 (it is '0 steps')\n",
    ),
    "part of a step": (
        '[validate]\nevery = "1.5 steps"',
        "run.toml:11: validate.every: '1.5 steps' is not a whole number of steps",
    ),
    "warm-up as a plain number": (
        '[schedule]\ntype = "cosine"\nwarmup = 2000',
        "run.toml:12: schedule.warmup: a plain number is a fraction of the run, at least 0 and "
        'below 1; or write "2k steps" (it is 2000)\n',
    ),
    "more than the whole run": (
        '[schedule]\ntype = "linear"\ndecay = 1.5',
        "run.toml:12: schedule.decay: a plain number is a fraction of the run, from 0 to 1; "
        'or write "2k steps" (it is 1.5)\n',
    ),
    "a ramp over the whole run": (
        "[train.ramp]\nstart = 4\nby = 4\nover = 1.0",
        "run.toml:13: train.ramp.over: a plain number is a fraction of the run, at least 0 and "
        'below 1; or write "2k steps" (it is 1.0)\n',
    ),
    "the whole run beside a warm-up": (
        '[schedule]\ntype = "warmup-stable-decay"\ndecay = 1',
        "run.toml:12: schedule.decay: warm-up and decay together are longer than the run\n",
    ),
    "time without a unit": (
        "time_limit = 90",
        'run.toml:10: train.time_limit: needs a unit: write "90s", "30m", "3h30m" or "1d" '
        "(it is 90)\n",
    ),
    "time that is none": (
        'time_limit = "soon"',
        "run.toml:10: train.time_limit: 'soon' is not a time; write \"90s\", ",
    ),
    "no patience": (
        '[parallel]\ntimeout = "0s"',
        'run.toml:11: parallel.timeout: must be at least "5s": processes send a heartbeat ',
    ),
    "no patience at the start": (
        '[parallel]\nstart_timeout = "4.9s"',
        'run.toml:11: parallel.start_timeout: must be at least "5s": ',
    ),
    "zero of a size that is a number or a word": (
        "[parallel]\ndp_shard = 0",
        'run.toml:11: parallel.dp_shard: must be a whole number from 1 or "auto" (it is 0)\n'
        "    Data parallel with weights",
    ),
    "another word for a size": (
        '[parallel]\ndp_replicate = "all"',
        'run.toml:11: parallel.dp_replicate: must be a whole number from 1 or "auto" '
        "(it is 'all')\n",
    ),
    "a table for a size": (
        "[parallel]\ntp = { size = 2 }",
        'run.toml:11: parallel.tp: must be a whole number from 1 or "auto" (it is {',
    ),
    "heads that do not divide": (
        "[model]\nheads = 3",
        "run.toml:11: model.heads: 3 heads do not divide the width 128\n    heads could be 1, 2, 4",
    ),
    "key heads that do not divide": (
        "[model]\nkv_heads = 3",
        "run.toml:11: model.kv_heads: 4 heads cannot share 3 key and value heads evenly\n"
        "    kv_heads must divide 4",
    ),
    "odd head width with rotary": (
        '[model]\nwidth = 12\npositions = "rotary"',
        "preset gpt2-nano: model.heads: rotary positions need an even head width, not 3",
    ),
    "odd head width of its own with rotary": (
        '[model]\nhead_width = 7\npositions = "rotary"',
        "run.toml:11: model.head_width: rotary positions need an even head width, not 7",
    ),
    "odd number of rotated features": (
        '[model]\nhead_width = 12\nrotary_fraction = 0.25\npositions = "rotary"',
        "run.toml:12: model.rotary_fraction: rotary positions need an even number of rotated "
        "features, not 3",
    ),
    "no rotated features": (
        '[model]\nrotary_fraction = 0.01\npositions = "rotary"',
        "run.toml:11: model.rotary_fraction: rotary positions need an even number of rotated "
        "features, not 0",
    ),
    "rotary fraction without rotary": (
        "[model]\nrotary_fraction = 0.5",
        "run.toml:11: model.rotary_fraction: has no effect with positions = 'learned'\n"
        '    remove it, or set model.positions = "rotary"',
    ),
    "a window as long as the context": (
        "[model]\nwindow = 128",
        "run.toml:11: model.window: has no effect with a context of 128",
    ),
    "windows with context parallelism": (
        "[model]\nwindow = 16\n[parallel]\ncp = 2",
        "run.toml:11: model.window: context-parallel attention has no windows\n"
        "    leave it out, or set parallel.cp = 1",
    ),
    "rotary base without rotary": (
        "[model]\nrotary_base = 500.0",
        "run.toml:11: model.rotary_base: has no effect with positions = 'learned'\n"
        '    remove it, or set model.positions = "rotary"',
    ),
    "value embeddings in neighbouring layers": (
        "[model]\nvalue_embeddings = 3",
        "run.toml:11: model.value_embeddings: only every other layer can have them: 2 of 4 layers\n"
        "    give at most 2",
    ),
    "indivisible micro-batch": (
        "micro_batch = 5",
        "run.toml:9: train.batch: batch 12 is not a multiple of micro_batch 5\n"
        "    micro_batch could be 3, 4, 6",
    ),
    "indivisible accumulation": (
        "accumulate = 5",
        "run.toml:9: train.batch: batch 12 is not a multiple of accumulate 5\n"
        "    accumulate could be 3, 4, 6",
    ),
    "three that disagree": (
        "micro_batch = 4\naccumulate = 2",
        "run.toml:9: train.batch: micro_batch 4 x accumulate 2 is 8, not batch 12\n"
        "    leave one of the three out",
    ),
    "loss scale without fp16": (
        '[precision]\ncompute = "bf16"\n[precision.loss_scale]\nwindow = 10',
        "run.toml:13: precision.loss_scale: has no effect with compute = 'bf16'\n"
        '    only "fp16" needs a loss scale',
    ),
    "fp8 without bf16": (
        '[precision]\ncompute = "fp32"\nfp8 = ["head"]',
        "run.toml:12: precision.fp8: needs compute = 'bf16', not 'fp32'\n"
        '    set precision.compute = "bf16", or leave fp8 out',
    ),
    "fp8 on the CPU": (
        '[precision]\ncompute = "bf16"\nfp8 = ["head"]\n[runtime]\ndevice = "cpu"',
        "run.toml:12: precision.fp8: needs an NVIDIA GPU, and runtime.device is 'cpu'\n"
        "    leave it out, or train on a GPU",
    ),
    "blocks in fp8 on another device": (
        '[precision]\nfp8 = ["mlp"]\n[runtime]\ndevice = "mps"',
        "run.toml:11: precision.fp8: needs an NVIDIA GPU, and runtime.device is 'mps'\n"
        "    leave it out, or train on a GPU",
    ),
    "blocks in fp8 with short sequences": (
        '[model]\ncontext = 24\n[precision]\nfp8 = ["mlp"]',
        "data.sequence: 24 is not a multiple of 16, which products in fp8 need\n"
        "    change it, or leave precision.fp8 out",
    ),
    "blocks in fp8 with an inner width that is no multiple": (
        '[model]\nmlp_width = 200\n[precision]\nfp8 = ["mlp", "attention"]',
        "run.toml:11: model.mlp_width: 200 is not a multiple of 16, which products in fp8 need\n"
        "    change it, or leave precision.fp8 out",
    ),
    "blocks in fp8 in stages": (
        '[precision]\nfp8 = ["mlp"]\n[parallel]\npp = 2',
        "run.toml:11: precision.fp8: pipeline stages do not support the fp8 scales of blocks\n"
        "    leave it out, or set parallel.pp = 1",
    ),
    "blocks in fp8 of workers": (
        '[precision]\nfp8 = ["head", "mlp"]\n[parallel]\ngossip.topology = "ring"',
        "run.toml:11: precision.fp8: each worker would have its own fp8 scales of blocks\n"
        '    leave "mlp" and "attention" out',
    ),
    "a head in fp8 that is divided": (
        '[precision]\nfp8 = ["head"]\n[parallel]\ntp = 2',
        "run.toml:11: precision.fp8: the head cannot use fp8 when tp shards it\n"
        '    leave "head" out, or set parallel.tp = 1',
    ),
    "fp8 without kernels": (
        '[precision]\ncompute = "bf16"\nfp8 = ["head"]\n[runtime]\nkernels = false',
        "run.toml:12: precision.fp8: needs a kernel, and runtime.kernels is false\n"
        "    leave one of the two out",
    ),
    "fp8 in a part that has none": (
        '[precision]\ncompute = "bf16"\nfp8 = ["embedding"]',
        "run.toml:12: precision.fp8.0: input should be 'head', 'mlp' or 'attention' (it is "
        "'embedding')",
    ),
    "fp8 as a word": (
        '[precision]\ncompute = "bf16"\nfp8 = "head"',
        "run.toml:12: precision.fp8: input should be a valid tuple (it is 'head')",
    ),
    "fp8 with a width that is no multiple": (
        '[model]\nwidth = 24\nheads = 4\n[precision]\ncompute = "bf16"\nfp8 = ["head"]',
        "run.toml:11: model.width: 24 is not a multiple of 16, which products in fp8 need\n"
        "    change it, or leave precision.fp8 out",
    ),
    "fp8 with a vocabulary that is no multiple": (
        '[model]\nvocab_multiple = 8\n[precision]\ncompute = "bf16"\nfp8 = ["head"]',
        "run.toml:11: model.vocab_multiple: 8 is not a multiple of 16, which products in fp8 need",
    ),
    "lowest scale above the first": (
        '[precision]\ncompute = "fp16"\nloss_scale = { initial = 4.0, minimum = 8.0 }',
        "run.toml:12: precision.loss_scale.minimum: 8.0 is above the initial scale 4.0",
    ),
    "warm-up longer than the run": (
        '[schedule]\ntype = "cosine"\nwarmup = "200 steps"',
        "run.toml:12: schedule.warmup: the warm-up ends at sample 2400, "
        "after the decay's end at sample 1200\n    shorten it, or raise train.until",
    ),
    "warm-up longer than the decay": (
        '[schedule]\ntype = "linear"\nwarmup = 0.5\ndecay = "50 steps"',
        "run.toml:12: schedule.warmup: the warm-up ends at sample 600, "
        "after the decay's end at sample 600\n",
    ),
    "warm-up and final decay too long": (
        '[schedule]\ntype = "warmup-stable-decay"\nwarmup = 0.5\ndecay = 0.6',
        "run.toml:13: schedule.decay: warm-up and decay together are longer than the run\n"
        "    shorten one, or raise train.until",
    ),
    "inverse-sqrt without warm-up": (
        '[schedule]\ntype = "inverse-sqrt"\nwarmup = 0.0',
        "run.toml:12: schedule.warmup: inverse-sqrt needs a warm-up above zero",
    ),
    "lowest rate above the peak": (
        '[optim]\nlr = 1e-4\n[schedule]\ntype = "cosine"\nmin_lr = 1e-3',
        "run.toml:14: schedule.min_lr: 0.001 is above the peak optim.lr = 0.0001",
    ),
    "missing in a table that was opened": (
        "[sample]\ntokens = 5",
        "run.toml:11: sample.every: this setting is required\n    How often.",
    ),
}


@pytest.mark.parametrize(("added", "message"), ADDED.values(), ids=ADDED.keys())
def test_a_mistake_in_the_file_is_told_with_its_line(added: str, message: str) -> None:
    error = complaint(f"{BASE}{added}\n")
    assert message in str(error)
    assert len(error.problems) == 1
    assert error.exit is Exit.CONFIG


# ------------------------------------------------------------------ a line of the file replaced

REPLACED = {
    "horizon without a unit": (
        'until = "100 steps"',
        "until = 100",
        f"run.toml:8: train.until: needs a unit: {DURATION} (it is 100)\n"
        '    Training length: "10k steps", "1M samples" or "20B tokens".',
    ),
    "no horizon": (
        'until = "100 steps"',
        "",
        "run.toml:9: train.until: this setting is required\n    Training length: ",
    ),
    "no batch": (
        "batch = 12",
        "",
        "train.batch: the batch size is not given\n    set train.batch, in samples per step",
    ),
    "no name": (
        'name = "trial"',
        "",
        "name: this setting is required\n    Name of the run: ",
    ),
    "name with a slash": (
        'name = "trial"',
        'name = "runs/trial"',
        "run.toml:1: name: string should match pattern ",
    ),
    "name with a line break": (
        'name = "trial"',
        'name = "trial\\n"',
        "run.toml:1: name: string should match pattern ",
    ),
    "hidden name": ('name = "trial"', 'name = ".trial"', "(it is '.trial')\n"),
    "split of one part": (
        'paths = "tokens/books"',
        'paths = "tokens/books"\nsplit = "9"',
        "run.toml:6: data.split: '9' is not a split\n"
        '    write two or three proportions such as "99,1" or "969,30,1", the first above 0',
    ),
    "split of four parts": (
        'paths = "tokens/books"',
        'paths = "tokens/books"\nsplit = "1,1,1,1"',
        "run.toml:6: data.split: '1,1,1,1' is not a split\n",
    ),
    "split of words": (
        'paths = "tokens/books"',
        'paths = "tokens/books"\nsplit = "most,rest"',
        "run.toml:6: data.split: 'most,rest' is not a split\n",
    ),
    "split without training": (
        'paths = "tokens/books"',
        'paths = "tokens/books"\nsplit = "0,1"',
        "run.toml:6: data.split: '0,1' is not a split\n",
    ),
    "split with a negative part": (
        'paths = "tokens/books"',
        'paths = "tokens/books"\nsplit = "9,-1"',
        "run.toml:6: data.split: '9,-1' is not a split\n",
    ),
    "split with something infinite": (
        'paths = "tokens/books"',
        'paths = "tokens/books"\nsplit = "inf,1"',
        "run.toml:6: data.split: 'inf,1' is not a split\n",
    ),
    "split beside a validation file": (
        'paths = "tokens/books"',
        'paths = "tokens/books"\nsplit = "9,1"\nvalidation = "tokens/held"',
        "run.toml:6: data.split: has no effect when data.validation is given\n"
        "    remove one of the two",
    ),
    "sequence longer than the context": (
        'paths = "tokens/books"',
        'paths = "tokens/books"\nsequence = 4096',
        "run.toml:6: data.sequence: 4096 is longer than the model's context 128\n"
        "    raise model.context or shorten it",
    ),
    "number in the place of paths": (
        'paths = "tokens/books"',
        "paths = 3",
        "run.toml:5: data.paths: must be a path, a list of paths, or a table from path to weight "
        "(it is 3)\n",
    ),
    "no path at all": (
        'paths = "tokens/books"',
        "paths = []",
        "run.toml:5: data.paths: must name at least one token set (it is [])\n",
    ),
    "a path twice": (
        'paths = "tokens/books"',
        'paths = ["a", "a"]',
        "run.toml:5: data.paths: a path is listed twice; to read a set more often, use weights",
    ),
    "a weight of nothing": (
        'paths = "tokens/books"',
        "paths = { a = 1, b = 0 }",
        "run.toml:5: data.paths: the weight of 'b' must be a number above 0, not 0 ",
    ),
    "a weight without end": (
        'paths = "tokens/books"',
        "paths = { a = 1, b = inf }",
        "run.toml:5: data.paths: the weight of 'b' must be a number above 0, not inf ",
    ),
    "a weight in words": (
        'paths = "tokens/books"',
        'paths = { a = "half" }',
        "run.toml:5: data.paths: the weight of 'a' must be a number above 0, not 'half' ",
    ),
    "a blend of one": (
        'paths = "tokens/books"',
        'paths = "tokens/books"\nblend = "proportion"',
        "run.toml:6: data.blend: has no effect on a single token set\n    remove it",
    ),
    "weights where everything is read": (
        'paths = "tokens/books"',
        'paths = { a = 1, b = 2 }\nblend = "exhaustive"',
        "run.toml:6: data.blend: reads every sample once, so the weights in data.paths cannot "
        "apply\n"
        '    write the paths as a list, or set data.blend = "proportion"',
    ),
    "all of what is random": (
        'paths = "tokens/books"',
        'paths = ["a", "b"]\nblend = "exhaustive"\norder = "random"',
        "run.toml:6: data.blend: windows that start at random places cannot all be visited once\n",
    ),
    "samples of another order than Megatron's": (
        'paths = "tokens/books"',
        'paths = "a"\nsamples = 5',
        "run.toml:6: data.samples: has no effect with order = 'shuffled'\n",
    ),
    "a seed of what is not shuffled": (
        'paths = "tokens/books"',
        'paths = "a"\nseed = 5\norder = "sequential"',
        "run.toml:6: data.seed: has no effect with order = 'sequential'\n",
    ),
    "a seed too large for Megatron": (
        'paths = "tokens/books"',
        'paths = "a"\norder = "megatron"\nseed = 4294967296',
        "run.toml:7: data.seed: Megatron's seeds are below 4294967296",
    ),
    "documents kept apart twice": (
        'paths = "tokens/books"',
        'paths = "a"\ndocuments = "masked"\nreset_positions = true',
        'run.toml:7: data.reset_positions: has no effect with documents = "masked", which does '
        "both\n"
        "    remove one of the two",
    ),
    "misspelt preset": (
        'preset = "gpt2-nano"',
        'preset = "gpt2-smal"',
        "preset: there is no preset 'gpt2-smal'\n    did you mean gpt2-small",
    ),
    "preset unlike any": (
        'preset = "gpt2-nano"',
        'preset = "quern"',
        "preset: there is no preset 'quern'\n    see `gristmill config --presets`",
    ),
    "preset that is a path": (
        'preset = "gpt2-nano"',
        'preset = "../presets/gpt2-nano"',
        "preset: there is no preset '../presets/gpt2-nano'\n",
    ),
    "preset that is a number": (
        'preset = "gpt2-nano"',
        "preset = 2",
        "preset: there is no preset 2\n",
    ),
    "start nowhere": (
        'preset = "gpt2-nano"',
        'model.start = "nowhere"',
        "model.start: 'nowhere' holds neither a run (run.toml) nor a Hugging Face model",
    ),
    "unclosed table": (
        "[train]",
        "[train",
        "run.toml: not valid TOML: Expected ']' at the end of a table declaration (at line 7, ",
    ),
    "text without quotes": (
        'name = "trial"',
        "name = trial",
        "run.toml: not valid TOML: Invalid value (at line 1, ",
    ),
    "key given twice": (
        "batch = 12",
        "batch = 12\nbatch = 13",
        "run.toml: not valid TOML: Cannot overwrite a value (at line 10, ",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), REPLACED.values(), ids=REPLACED.keys())
def test_a_wrong_line_is_told(old: str, new: str, message: str) -> None:
    assert old in BASE
    error = complaint(BASE.replace(old, new))
    assert message in str(error)
    assert len(error.problems) == 1


# ------------------------------------------------------------------ words on the command line

WORDS = {
    "no equals sign": (
        "optim.lr",
        "command line: 'optim.lr' is not a setting\n"
        "    write TABLE.KEY=VALUE, for example optim.lr=3e-4",
    ),
    "no key": ("=3", "command line: '=3' is not a setting\n"),
    "an option": ("--lr=3", "command line: '--lr=3' is not a setting\n"),
    "an empty part": ("optim..lr=3", "command line: 'optim..lr=3' is not a setting\n"),
    "typo": (
        "optim.lrr=3e-4",
        "command line 'optim.lrr=3e-4': optim.lrr: there is no such setting\n    did you mean lr?",
    ),
    "table left out": (
        "lr=3e-4",
        "command line 'lr=3e-4': lr: there is no such setting\n    did you mean optim.lr?",
    ),
    "wrong type": (
        "train.batch=many",
        "command line 'train.batch=many': train.batch: input should be a valid integer "
        "(it is 'many')\n    Samples per step",
    ),
    "unit left out": (
        "train.until=500",
        f"command line 'train.until=500': train.until: needs a unit: {DURATION} (it is 500)\n",
    ),
    "broken rule": (
        "model.heads=5",
        "command line 'model.heads=5': model.heads: 5 heads do not divide the width 128\n"
        "    heads could be 2, 4, 8",
    ),
    "rule broken by a word and a line": (
        "train.micro_batch=5",
        "run.toml:9: train.batch: batch 12 is not a multiple of micro_batch 5\n",
    ),
    "value for a table": (
        "train=5",
        "command line 'train=5': train: must be a table, [train] (it is 5)",
    ),
    "unknown preset": (
        "preset=gpt3-1.7",
        "preset: there is no preset 'gpt3-1.7'\n    did you mean gpt3-1.7b",
    ),
    "a required setting taken away": (
        "model.layers=unset",
        "command line 'model.layers=unset': model.layers: this setting is required\n"
        "    Number of transformer blocks.",
    ),
    "a table taken away": (
        "model=unset",
        "command line 'model=unset': model: every run has this table\n"
        "    unset its settings one by one",
    ),
    "a table of several types taken away": (
        "optim=unset",
        "command line 'optim=unset': optim: every run has this table\n",
    ),
    "nothing taken away": (
        "model.logitcap=unset",
        "command line 'model.logitcap=unset': model.logitcap: there is no such setting\n"
        "    did you mean logit_cap?",
    ),
    "a setting of another type taken away": (
        "optim.momentum=unset",
        "command line 'optim.momentum=unset': optim.momentum: there is no such setting\n"
        "    optim has it with type = 'sgd' or 'muon'",
    ),
    "empty name": ("name=", "command line 'name=': name: string should match pattern "),
}


@pytest.mark.parametrize(("word", "message"), WORDS.values(), ids=WORDS.keys())
def test_a_wrong_word_is_told_as_it_was_typed(word: str, message: str) -> None:
    error = complaint(BASE, (word,))
    assert message in str(error)
    assert len(error.problems) == 1


# ------------------------------------------------------------------ whole files


def test_all_wrong_settings_are_told_at_once() -> None:
    error = complaint(
        'name = "a b"\npreset = "gpt2-nano"\n'
        '[data]\npath = "tokens"\npaths = "tokens"\n'
        "[train]\nuntil = 5\nbatch = 0\n"
    )
    assert [problem.where for problem in error.problems] == [
        "run.toml:1: name",
        "run.toml:4: data.path",
        "run.toml:7: train.until",
        "run.toml:8: train.batch",
    ]


def test_all_broken_rules_are_told_at_once() -> None:
    error = complaint(
        BASE.replace("batch = 12", "batch = 12\nmicro_batch = 7")
        + '[model]\nheads = 3\nrotary_base = 10.0\n[schedule]\ntype = "linear"\nmin_lr = 1.0\n'
    )
    assert [problem.where for problem in error.problems] == [
        "run.toml:12: model.heads",
        "run.toml:13: model.rotary_base",
        "run.toml:9: train.batch",
        "run.toml:16: schedule.min_lr",
    ]


def test_an_empty_file_lacks_what_is_required() -> None:
    names = [str(problem).split(":")[1] for problem in complaint("").problems]
    assert names == [" name", " model", " data", " train"]


def test_a_missing_setting_names_the_file() -> None:
    assert "run.toml" in str(complaint(BASE.replace('name = "trial"', "")))


def test_a_schedule_without_a_type_is_of_the_default_type() -> None:
    config = load_text(BASE + '[schedule]\nwarmup = "2 steps"\n', place="run.toml")
    assert config.schedule.type == "cosine"
    assert str(config.schedule.warmup) == "2 steps"


def test_a_key_of_other_schedules_is_not_suggested_again() -> None:
    error = complaint(BASE + '[schedule]\ntype = "constant"\ndecay = 0.2\n')
    assert "run.toml:12: schedule.decay: there is no such setting" in str(error)
    assert "did you mean schedule.decay?" not in str(error)


def test_a_table_has_one_name() -> None:
    error = complaint(BASE + '[validation]\nevery = "5 steps"\n')
    assert "did you mean validate?" in str(error)


def test_a_run_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert str(caught.value) == f"{path}: cannot read the run file: No such file or directory"
    path.write_bytes(b'name = "M\xfchle"')
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert str(caught.value) == f"{path}: the run file is not UTF-8 text"


def test_the_place_is_the_file_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE.replace("12", "0"))
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert str(caught.value).startswith(f"{path}:9: train.batch: ")


# ------------------------------------------------------------------ weights to start from


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return tmp_path


SIZELESS = BASE.replace('preset = "gpt2-nano"', "")


def test_sizes_come_from_the_weights(weights: Path) -> None:
    model = load_text(SIZELESS, (f"model.start={weights}",), place="run.toml").model
    assert (model.layers, model.heads, model.width, model.context) == (2, 2, 32, 64)
    assert (model.vocab, model.activation) == (300, "gelu_tanh")


def test_the_folder_of_the_weights_is_found_by_the_caller(weights: Path) -> None:
    asked: list[tuple[str, str]] = []

    def find(name: str, *, where: str) -> Path:
        asked.append((name, where))
        return weights

    words = ("model.start=someone/something",)
    model = load_text(SIZELESS, words, place="run.toml", find_model=find).model
    assert (model.start, model.layers) == ("someone/something", 2)
    assert asked == [("someone/something", "model.start")]


def test_sizes_that_disagree_with_the_weights_are_told(weights: Path) -> None:
    error = complaint(f"{SIZELESS}[model]\nstart = '{weights}'\nlayers = 3\nbias = false\n")
    assert [str(problem) for problem in error.problems] == [
        f"run.toml:12: model.layers: is 3, but the weights in '{weights}' have 2\n"
        "    leave it out: it is taken from the weights",
        f"run.toml:13: model.bias: is False, but the weights in '{weights}' have True\n"
        "    leave it out: it is taken from the weights",
    ]


def test_a_preset_that_disagrees_with_the_weights_is_told(weights: Path) -> None:
    error = complaint(BASE, (f"model.start={weights}",))
    assert str(error.problems[0]).startswith("preset gpt2-nano: model.layers: is 4, but ")


@pytest.mark.parametrize("word", ["model.dropout=0.1", "model.init_std=0.01", "model.vocab=280"])
def test_what_does_not_change_shapes_may_differ(weights: Path, word: str) -> None:
    load_text(SIZELESS, (f"model.start={weights}", word), place="run.toml")


@pytest.mark.parametrize(
    "word",
    [
        "model.kv_heads=1",
        "model.mlp_width=64",
        "model.positions=rotary",
        "model.norm=rmsnorm",
        "model.qk_norm=true",
    ],
)
def test_shapes_the_weights_leave_at_their_default_must_agree_too(weights: Path, word: str) -> None:
    error = complaint(SIZELESS, (f"model.start={weights}", word))
    assert word.split("=")[0] in str(error)


def test_a_run_folder_is_a_start_too(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[model]\nlayers = 2\nheads = 2\nwidth = 32\ncontext = 64\nqk_norm = true\n"
    )
    words = (f"model.start={tmp_path}",)
    assert load_text(SIZELESS, words, place="run.toml").model.qk_norm
    error = complaint(SIZELESS, (*words, "model.qk_norm=false"))
    assert "model.qk_norm: is False, but the weights in" in str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "the model is of type 'bert'"),
        ({"activation_function": "silu"}, "activation_function = 'silu': not supported"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = true: not supported",
        ),
    ],
)
def test_a_model_that_cannot_be_read_is_refused(
    weights: Path, change: dict[str, object], message: str
) -> None:
    path = weights / "config.json"
    path.write_text(json.dumps({**GPT2, **change}))
    error = complaint(SIZELESS, (f"model.start={weights}",))
    assert f"model.start: {path}: {message}" in str(error)
    assert error.exit is Exit.DATA


def test_unscaled_attention_is_refused_by_its_own_name(weights: Path) -> None:
    (weights / "config.json").write_text(json.dumps({**GPT2, "scale_attn_weights": False}))
    assert "scale_attn_weights" in str(complaint(SIZELESS, (f"model.start={weights}",)))


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", "[1]"), ("run.toml", "name = 'x'\n"), ("run.toml", "name =\n")],
)
def test_a_damaged_start_names_its_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert str(tmp_path / name) in str(complaint(SIZELESS, (f"model.start={tmp_path}",)))


# ------------------------------------------------------------------ conversations

CHAT = 'data.kind="chat"'


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("data.order=megatron", "data.order: conversations have no megatron order"),
        ("data.order=sequential", "data.order: conversations have no sequential order"),
        ("data.documents=masked", "has no effect on conversations: conversations are always"),
        ("data.reset_attention=true", "data.reset_attention: has no effect on conversations"),
        ("data.reset_positions=true", "data.reset_positions: has no effect on conversations"),
        ("data.mask_end_of_text=true", "the answers decide what counts in the loss"),
        ("data.in_memory=true", "they are in memory anyway"),
        ("data.verify=false", "a resumed run compares their content instead"),
        ("data.samples=3", "data.samples: has no effect with order = 'shuffled'"),
        ("data.cache=folder", "data.cache: has no effect with order = 'shuffled'"),
        ("data.tokenizer=unset", "conversations name no tokenizer, and the run starts from no"),
    ],
)
def test_what_cannot_act_on_conversations(word: str, told: str) -> None:
    error = complaint(BASE, (CHAT, "data.tokenizer=bytes", word))
    assert len(error.problems) == 1
    assert told in str(error)


def test_a_template_is_for_conversations() -> None:
    error = complaint(BASE, ("data.template=plain",))
    assert "data.template: has no effect on token files" in str(error)
    words = (CHAT, "data.tokenizer=bytes", "data.template=plain")
    assert load_text(BASE, words, place="run.toml").data.template == "plain"
