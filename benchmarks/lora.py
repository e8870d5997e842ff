"""Fine-tuning with adapters beside fine-tuning all weights: step time, and memory beside the
weights.

    python benchmarks/lora.py                      a small GPT-2 on the CPU, in fp32
    python benchmarks/lora.py --device cuda        GPT-2 124M in bf16
    python benchmarks/lora.py --systems lora peft  with PEFT on transformers, if it is installed

All start from the same weights and read the same random tokens in the same order, with AdamW and
clipping; adapters have the same rank, scale and layers. Each system runs in a process of its own,
one after the other, `--rounds` times in turn. A step's time is the median after the warm-up, of all
rounds. Gradients and optimizer state are counted tensor by tensor, after a step. Peak memory is
that of the process on a CPU, which includes the program, and of allocated GPU memory otherwise.

PEFT has its best settings: the frozen model in the compute format, adapters in fp32, scaled
dot-product attention, fused AdamW, and on a GPU a second row with torch.compile.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

SMALL = {"n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 256, "vocab_size": 8192}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
RUN = """
name = "{name}"
folder = "{folder}/{name}"
data = {{ paths = "{folder}/tokens", split = "1000,0", order = "sequential", verify = false }}
model = {{ start = "{folder}/model", dropout = 0.0 }}
train = {{ until = "{steps} steps", batch = {batch}, micro_batch = {batch} }}
optim = {{ lr = 1e-4, weight_decay = 0.0 }}
schedule = {{ type = "constant", warmup = "0 steps" }}
precision.compute = "{compute}"
runtime.device = "{device}"
"""


def main() -> None:
    options = parse()
    if options.child:
        options.child_result.write_text(json.dumps(_CHILDREN[options.child](options)))
        return
    names = options.systems or ["full", "lora"]
    if not options.systems and importlib.util.find_spec("peft"):
        names += ["peft"] if options.device == "cpu" else ["peft", "peft-compiled"]
    elif not options.systems:
        print("peft is not installed: only ours is measured")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        options.folder = Path(name)
        write_inputs(options)
        found: dict[str, list[dict[str, Any]]] = {one: [] for one in names}
        for _ in range(options.rounds):
            for one in names:
                found[one].append(in_child(options, one))
    print(f"\n{describe(options)}\n")
    print("| system | ms per step | speed | gradients and state | peak memory | last loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    times = {one: median(s for run in runs for s in run["seconds"]) for one, runs in found.items()}
    for one, runs in found.items():
        state, peak = (median(run[key] for run in runs) for key in ("state", "peak"))
        print(
            f"| {one} | {1000 * times[one]:,.1f} | {times[names[0]] / times[one]:.2f} x "
            f"| {state / 2**20:,.1f} MiB | {peak / 2**20:,.0f} MiB | {runs[0]['loss']:.4f} |"
        )


def describe(options: argparse.Namespace) -> str:
    import torch

    device = platform.machine() if options.device == "cpu" else torch.cuda.get_device_name()
    sizes = SMALL if options.device == "cpu" else GPT2
    return (
        f"GPT-2 with {sizes['n_layer']} layers of {sizes['n_embd']}, rank {options.rank} on all "
        f"linear layers, {options.compute}, batch {options.batch} of {sizes['n_positions']} "
        f"tokens, {options.steps} steps of which {options.warm_up} warm up, {options.rounds} "
        f"rounds, on {device}; torch {torch.__version__}"
    )


def in_child(options: argparse.Namespace, name: str) -> dict[str, Any]:
    result = options.folder / "result.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
    command += ["--folder", str(options.folder), "--child-result", str(result)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def write_inputs(options: argparse.Namespace) -> None:
    """The weights that all start from, and the tokens that all read."""
    import torch
    import transformers

    from gristmill.bench.measure import write_random_tokens

    sizes = SMALL if options.device == "cpu" else GPT2
    torch.manual_seed(0)
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates))
    made.save_pretrained(options.folder / "model")
    tokens = (options.steps + 1) * options.batch * sizes["n_positions"] + 10_000
    write_random_tokens(options.folder / "tokens", vocabulary=sizes["vocab_size"], tokens=tokens)


# ------------------------------------------------------------------ one system in its process


def assembled(options: argparse.Namespace, *words: str) -> Any:
    from gristmill.base.limits import keep_freed_memory

    keep_freed_memory()
    from gristmill.config.load import load_text
    from gristmill.track.folder import RunFolder
    from gristmill.train.assemble import assemble

    text = RUN.format(**{**vars(options), "name": options.child})
    # As a run does that is long enough to speak of its speed.
    compiled = ["runtime.compile=true"] if options.device == "cuda" else []
    config = load_text(text, [*compiled, *words], place="benchmark")
    return assemble(config, RunFolder(options.folder / options.child))


def measure(
    options: argparse.Namespace,
    step: Callable[[Any], float],
    batches: Iterable[Any],
    state: Callable[[], int],
) -> dict[str, Any]:
    import torch

    seconds, loss = [], 0.0
    for number, batch in enumerate(batches):
        if number == options.steps:
            break
        began = time.perf_counter()
        loss = step(batch)  # reads the loss, and so waits for the device
        seconds.append(time.perf_counter() - began)
    if options.device == "cuda":
        peak = int(torch.cuda.max_memory_allocated())
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds[options.warm_up :], "state": state(), "peak": peak, "loss": loss}


def train_ours(options: argparse.Namespace) -> dict[str, Any]:
    from gristmill.base.units import Progress
    from gristmill.train.assemble import build_loader

    words = [f"model.lora.rank={options.rank}"] if options.child == "lora" else []
    parts = assembled(options, *words)
    strategy, progress, gradients = parts.strategy, Progress(), 0

    def step(batches: Any) -> float:
        nonlocal progress, gradients
        result = strategy.accumulate(batches, progress)
        held = (one.local.grad for one in strategy.parameters.values())
        gradients = sum(gradient.nbytes for gradient in held if gradient is not None)
        result = strategy.update(result)
        progress = progress.after(samples=result.samples, tokens=result.tokens)
        return float(result.loss)

    def state() -> int:
        return gradients + sum(entry.value.nbytes for entry in strategy.optimizer.entries())

    return measure(options, step, build_loader(parts).starting_at(progress), state)


def train_peer(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    from gristmill.base.units import Progress
    from gristmill.train.assemble import build_loader

    parts = assembled(options)  # for its batches
    batches = build_loader(parts).starting_at(Progress())
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype = torch.float32 if options.compute == "fp32" else torch.bfloat16
    base = transformers.AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=dtype)
    settings = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, settings).to(options.device).train()
    forward = torch.compile(model) if options.child == "peft-compiled" else model
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    gradients = 0

    def step(batches: Any) -> float:
        nonlocal gradients
        (batch,) = batches
        ids, targets = batch.tokens_BT.to(options.device), batch.targets_BT.to(options.device)
        with torch.autocast(options.device, dtype=torch.bfloat16, enabled=dtype != torch.float32):
            logits = forward(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        gradients = sum(one.grad.nbytes for one in trained if one.grad is not None)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    def state() -> int:
        held = (one for entry in optimizer.state.values() for one in entry.values())
        return gradients + sum(one.nbytes for one in held if isinstance(one, torch.Tensor))

    return measure(options, step, batches, state)


_CHILDREN = {
    "full": train_ours,
    "lora": train_ours,
    "peft": train_peer,
    "peft-compiled": train_peer,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, help="4 on a CPU, 32 on a GPU")
    parser.add_argument("--steps", type=int, help="16 on a CPU, 60 on a GPU")
    parser.add_argument("--warm-up", type=int, help="4 on a CPU, 20 on a GPU")
    parser.add_argument("--systems", nargs="+", choices=_CHILDREN)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=_CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--child-result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cpu = options.device == "cpu"
    defaults = {"batch": 4 if cpu else 32, "steps": 16 if cpu else 60, "warm_up": 4 if cpu else 20}
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)
    options.compute = "fp32" if cpu else "bf16"
    return options


if __name__ == "__main__":
    main()
