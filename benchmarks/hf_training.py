"""Training a model of transformers: its own Trainer beside ours, tokens/s and peak memory.

    pip install accelerate                                what the Trainer needs
    python benchmarks/hf_training.py                      a small GPT-2 on the CPU, in fp32
    python benchmarks/hf_training.py --device cuda        GPT-2 124M in bf16
    python benchmarks/hf_training.py --device cuda --model llama
    python benchmarks/hf_training.py --device cuda --model llama-1b --batch 32 --micro-batch 8

Both start from the same weights and read the same windows of the same random tokens in the same
order, with AdamW, clipping and no dropout; so the losses of the last steps must agree. Each
system runs in a process of its own, one after the other, `--rounds` times in turn.

The Trainer has its best settings: fused AdamW, scaled dot-product attention, tokens in memory, and
torch.compile where it is faster (on a GPU both rows are shown). Time is taken from the end of the
warm-up to the last step. Memory is the peak of allocated GPU memory, on a CPU that of the process.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 256,
        "n_positions": 256,
        "vocab_size": 50257,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "n_positions": 1024,
        "vocab_size": 50257,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "llama-1b": {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}
RUN = """
name = "ours"
folder = "{folder}/ours"
data = {{ paths = "{folder}/tokens", split = "1000,0", order = "sequential", verify = false }}
model = {{ hf = "{folder}/model", init = "pretrained" }}
train = {{ until = "{steps} steps", batch = {batch}, micro_batch = {micro}, clip = 1.0 }}
optim = {{ lr = 1e-4, weight_decay = 0.01, beta1 = 0.9, beta2 = 0.999, eps = 1e-8 }}
schedule = {{ type = "constant", warmup = "0 steps" }}
checkpoint = {{ every = "1M steps", keep_best = false }}
precision.compute = "{compute}"
runtime.device = "{device}"
"""


def main() -> None:
    options = parse()
    if options.child:
        options.child_result.write_text(json.dumps(_CHILDREN[options.child](options)))
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        options.folder = Path(name)
        write_inputs(options)
        names = options.systems or list(_CHILDREN)[: 3 if options.device == "cuda" else 2]
        found: dict[str, list[dict[str, Any]]] = {one: [] for one in names}
        for round_ in range(options.rounds):
            for one in names:
                found[one].append(in_child(options, one))
                print(f"round {round_ + 1}, {one}: {found[one][-1]}", flush=True)
    print(f"\n{describe(options)}\n")
    print("| system | tokens/s | of the best Trainer | peak memory | of that Trainer | last loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    speed = {one: median(run["tokens_per_second"] for run in runs) for one, runs in found.items()}
    memory = {one: median(run["memory"] for run in runs) for one, runs in found.items()}
    best = max((one for one in names if one != "ours"), key=speed.__getitem__)
    for one in names:
        print(
            f"| {one} | {speed[one]:,.0f} | {speed[one] / speed[best]:.3f} "
            f"| {memory[one] / 2**30:.2f} GiB | {memory[one] / memory[best]:.3f} "
            f"| {mean(run['loss'] for run in found[one]):.4f} |"
        )


def describe(options: argparse.Namespace) -> str:
    import torch
    import transformers

    device = platform.machine() if options.device == "cpu" else torch.cuda.get_device_name()
    return (
        f"{options.model}, {options.compute}, batch {options.batch} in micro-batches of "
        f"{options.micro_batch}, {options.steps} steps of which {options.warm_up} warm up, on "
        f"{device}; torch {torch.__version__}, transformers {transformers.__version__}"
    )


def in_child(options: argparse.Namespace, name: str) -> dict[str, Any]:
    result = options.folder / f"{name}.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
    command += ["--folder", str(options.folder), "--child-result", str(result)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def write_inputs(options: argparse.Namespace) -> None:
    """The weights that both start from, and the tokens that both read."""
    import torch
    import transformers

    from gristmill.bench.measure import write_random_tokens

    table = dict(MODELS[options.model])
    settings = transformers.AutoConfig.for_model(table.pop("model_type"), **table)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(
        options.folder / "model"
    )
    needed = options.steps * options.batch * options.sequence + 1
    write_random_tokens(
        options.folder / "tokens", vocabulary=settings.vocab_size, tokens=needed + 10_000
    )


# ------------------------------------------------------------------ one system in its process


def peak_memory(device: str) -> int:
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train_ours(options: argparse.Namespace) -> dict[str, Any]:
    from gristmill.base.limits import keep_freed_memory

    keep_freed_memory()
    from gristmill.config.load import load_text
    from gristmill.track.metrics import read_metrics
    from gristmill.track.records import StepRecord
    from gristmill.train.run import Run

    text = RUN.format(
        folder=options.folder,
        steps=options.steps,
        batch=options.batch,
        micro=options.micro_batch,
        compute=options.compute,
        device=options.device,
    )
    words = [f"data.sequence={options.sequence}", *options.settings]
    if options.device == "cuda":  # as a run does that is long enough to speak of its speed
        words.insert(0, "runtime.compile=true")
    Run(load_text(text, words, place="benchmark")).train()
    records = read_metrics(options.folder / "ours" / "metrics.jsonl")
    steps = [one for one in records if isinstance(one, StepRecord)]
    timed = steps[options.warm_up :]
    seconds = timed[-1].time - steps[options.warm_up - 1].time
    return {
        "tokens_per_second": len(timed) * options.batch * options.sequence / seconds,
        "memory": peak_memory(options.device),
        "loss": mean(one.loss for one in steps[-options.warm_up :]),
    }


def train_peer(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from gristmill.tokens.store import open_tokens

    reader = open_tokens(options.folder / "tokens")
    length = options.sequence
    ids = np.asarray(reader.read(0, len(reader)), dtype=np.int64)
    windows = torch.from_numpy(ids[: len(ids) // length * length].reshape(-1, length))
    labels = windows.clone()
    labels[:, 0] = -100
    torch.backends.cuda.matmul.allow_tf32 = True
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.folder / "model", dtype=torch.float32
    )

    class Windows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(windows)

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            # The model shifts labels by one. The first is then not among those counted.
            return {"input_ids": windows[number], "labels": labels[number]}

    class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        began = ended = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step in (options.warm_up, options.steps):
                if options.device == "cuda":
                    torch.cuda.synchronize()
                moment = time.perf_counter()
                if state.global_step == options.warm_up:
                    self.began = moment
                else:
                    self.ended = moment

    clock = Clock()
    arguments = transformers.TrainingArguments(
        output_dir=str(options.folder / options.child),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.batch // options.micro_batch,
        learning_rate=1e-4,
        weight_decay=0.01,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=options.compute == "bf16",
        use_cpu=options.device == "cpu",
        torch_compile=options.child == "trainer-compiled",
        logging_steps=options.warm_up,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=options.device == "cuda",
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=Windows(), callbacks=[clock])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    timed = options.steps - options.warm_up
    return {
        "tokens_per_second": timed * options.batch * length / (clock.ended - clock.began),
        "memory": peak_memory(options.device),
        "loss": losses[-1],
    }


_CHILDREN = {"ours": train_ours, "trainer": train_peer, "trainer-compiled": train_peer}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=MODELS, help="small on a CPU, gpt2 on a GPU")
    parser.add_argument("--batch", type=int, help="8 on a CPU, 64 on a GPU")
    parser.add_argument("--micro-batch", type=int, help="4 on a CPU, 32 on a GPU")
    parser.add_argument("--sequence", type=int, help="the context of the model, up to 1024")
    parser.add_argument("--steps", type=int, help="24 on a CPU, 60 on a GPU")
    parser.add_argument("--warm-up", type=int, help="4 on a CPU, 20 on a GPU")
    parser.add_argument("--systems", nargs="+", choices=_CHILDREN, help="all if not given")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--settings", nargs="*", default=[], help="further settings of ours")
    parser.add_argument("--child", choices=_CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--child-result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cpu = options.device == "cpu"
    defaults = {
        "model": "small" if cpu else "gpt2",
        "batch": 8 if cpu else 64,
        "micro_batch": 4 if cpu else 32,
        "steps": 24 if cpu else 60,
        "warm_up": 4 if cpu else 20,
    }
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)
    table = MODELS[options.model]
    most = table.get("n_positions", table.get("max_position_embeddings"))
    options.sequence = options.sequence or min(1024, most)
    options.compute = "fp32" if cpu else "bf16"
    if options.steps % options.warm_up:
        parser.error("--steps must be a multiple of --warm-up, whose length the last loss covers")
    return options


if __name__ == "__main__":
    main()
