"""Generation beside its peers, on the same weights and in one go.

    python benchmarks/generation.py                             on a GPU: GPT-2 124M, bf16
    python benchmarks/generation.py --model llama-1b
    python benchmarks/generation.py --device cpu --sequences 1 8
    python benchmarks/generation.py --steps                     the GPU's part of a step alone
    python benchmarks/generation.py --company 10000             the same text in any company?

    ours          the engine that `generate`, `evaluate` and `serve` use
    transformers  generate() as it comes; and with a static cache, whose step it compiles
    static        the way of gpt-fast in plain torch (`static_peer.py`): static cache, one compiled
                  step in a CUDA graph, tokens drawn on the device. One prompt length for all

All generate as many tokens for as many sequences, greedily or with top-k, with random weights: text
does not matter for speed. TTFT is the time to the first token of a batch, TPOT that of each further
token, and the bound the time to read the weights and half of the final cache from memory once, at
the speed at which this machine copies.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from static_peer import StaticPeer

from gristmill.checkpoint.loading import load_weights
from gristmill.config.hf import from_hf
from gristmill.config.schema import parse_model
from gristmill.generate.engine import Engine
from gristmill.generate.request import Generation, Request
from gristmill.generate.sampling import Sampling
from gristmill.models.build import build_meta_model, build_model
from gristmill.models.families import open_foreign
from gristmill.models.spec import CausalLM
from gristmill.models.weights import WeightsInMemory

TOP_K = 50
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GiB = 2**30


@dataclass(frozen=True)
class Row:
    """What was measured of one system."""

    system: str
    sequences: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    bound: float
    """Share of the memory bound that decoding reaches."""
    begin_s: float
    """Before the first measurement: compiling, mostly."""


@dataclass(frozen=True)
class Work:
    """What each system is asked."""

    sequences: int
    prompt: int
    tokens: int
    sampled: bool

    def prompts(self, vocab: int) -> list[list[int]]:
        """Random ids."""
        drawn = torch.randint(0, vocab, (self.sequences, self.prompt))
        return [list(map(int, row)) for row in drawn]


Continue = Callable[[list[list[int]], int], Iterator[None]]
"""Continue prompts by so many tokens; yields when the first tokens are there, and at the end."""


def library_model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of transformers with random weights."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = transformers.GPT2Config()
    elif name == "llama-1b":
        config = transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        )
    else:  # a quick look
        config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1000)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    return model.eval()


def our_model(theirs: Any, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """The same model as ours, with the same weights."""
    values = theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}
    config = parse_model(from_hf(values, where="config"))
    vocab = theirs.config.vocab_size
    weights = WeightsInMemory({name: p.cpu() for name, p in theirs.state_dict().items()})
    model = build_model(config, vocab=vocab, device=device, dtype=dtype)
    meta_model = build_meta_model(config, vocab=vocab)
    load_weights(model, open_foreign(weights, meta_model, theirs.config.model_type))
    model.compute = dtype
    return model.eval()


def ours(model: CausalLM, work: Work, dtype: torch.dtype) -> Continue:
    engine = Engine(model, slots=work.sequences, dtype=dtype)

    def go_on(prompts: list[list[int]], tokens: int) -> Iterator[None]:
        sampling = Sampling(temperature=1.0 if work.sampled else 0.0, top_k=TOP_K)
        asked = [
            engine.submit(Request(ids, tokens, sampling, sample=sample))
            for sample, ids in enumerate(prompts)
        ]
        while not all(generation.ids for generation in asked):
            engine.step()
        yield
        while engine.busy:
            engine.step()
        assert all(len(generation.ids) == tokens for generation in asked)
        yield

    return go_on


def transformers_generate(model: Any, work: Work, *, static: bool) -> Continue:
    """Its `generate`; the first token is timed as a generation of one."""
    device = model.device

    def go_on(prompts: list[list[int]], tokens: int) -> Iterator[None]:
        ids = torch.tensor(prompts, device=device)
        options: dict[str, Any] = {"do_sample": work.sampled, "top_k": TOP_K}
        if static:
            options["cache_implementation"] = "static"

        def once(count: int) -> None:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                **options,
            )

        once(1)
        yield
        once(tokens)
        yield

    return go_on


def static_peer(model: Any, work: Work) -> Continue:
    peer = StaticPeer(
        model,
        sequences=work.sequences,
        length=work.prompt + work.tokens,
        top_k=TOP_K if work.sampled else None,
    )

    def go_on(prompts: list[list[int]], tokens: int) -> Iterator[None]:
        peer.prefill(torch.tensor(prompts, device=model.device))
        peer.first()
        yield
        peer.go_on(tokens - 1)
        yield

    return go_on


def measure(
    name: str, go_on: Continue, work: Work, *, vocab: int, bound_s: float, repeats: int
) -> Row:
    """The middle one of some repetitions."""
    # transformers generates the first token again with the others.
    again = name.startswith("transformers")

    def once() -> tuple[float, float]:
        prompts = work.prompts(vocab)
        begin = time.perf_counter()
        steps = go_on(prompts, work.tokens)
        next(steps)
        first = time.perf_counter() - begin
        next(steps)
        whole = time.perf_counter() - begin
        return first, whole - first if again else whole

    begin = time.perf_counter()
    once()
    once()
    begun = time.perf_counter() - begin
    times = [once() for _ in range(repeats)]
    first = statistics.median(one for one, _ in times)
    whole = statistics.median(one for _, one in times)
    each = (whole - first) / (work.tokens - 1)
    return Row(
        name,
        work.sequences,
        1e3 * first,
        1e3 * each,
        work.sequences * work.tokens / whole,
        bound_s / each,
        begun,
    )


def copy_speed(device: torch.device) -> float:
    """Bytes read per second."""
    size = 2 * GiB if device.type == "cuda" else GiB // 4
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def once() -> float:
        _synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        return time.perf_counter() - begin

    return 2 * size / min(once() for _ in range(5))


def bound(model: CausalLM, work: Work, dtype: torch.dtype, speed: float) -> float:
    """Seconds to read all that a step must read."""
    weights = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    half = work.prompt + work.tokens // 2
    return (weights + work.sequences * model.slot_bytes(half, dtype=dtype)) / speed


def in_company(model: CausalLM, count: int, *, slots: int, dtype: torch.dtype) -> dict[str, int]:
    """Requests with seeds of their own, twice: in another order, with others beside them, with
    another number of slots, and stopped now and then. How many had another text."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(model.vocab) for _ in range(draw.choice([1, 3, 17, 60, 130]))]
        for _ in range(40)
    ]
    requests = []
    for seed in range(count):
        sampling = Sampling(
            temperature=draw.choice([0.0, 0.7, 1.0]),
            top_k=draw.choice([0, 20, 50]),
            top_p=draw.choice([1.0, 0.9]),
            repetition_penalty=draw.choice([1.0, 1.2]),
            seed=seed,
        )
        requests.append(Request(draw.choice(prompts), draw.randrange(1, 48), sampling))

    def run(order: list[int], slots: int) -> dict[int, list[int]]:
        engine = Engine(model, slots=slots, dtype=dtype)
        asked: dict[int, Generation] = {}
        waiting = list(order)
        while waiting or engine.busy:
            for number in waiting[: draw.randrange(1, 9)]:
                asked[number] = engine.submit(requests[number])
                waiting.remove(number)
                if draw.random() < 0.1:  # somebody who leaves
                    guest = engine.submit(requests[draw.randrange(count)])
                    for _ in range(draw.randrange(4)):
                        engine.step()
                    engine.cancel(guest)
            engine.step()
        return {number: generation.ids for number, generation in asked.items()}

    order = list(range(count))
    first = run(order, slots)
    draw.shuffle(order)
    # On a CPU the number of slots decides how products are computed.
    second = run(order, slots if model.device.type == "cpu" else max(1, slots // 2 + 3))
    different = sum(first[number] != second[number] for number in order)
    return {"requests": count, "tokens": sum(map(len, first.values())), "different": different}


def step_times(model: CausalLM, sequences: int, dtype: torch.dtype) -> dict[int, float]:
    """Microseconds of a step by itself, by the positions that each sequence has."""
    from gristmill.generate.graphs import GraphSteps  # needs Triton

    engine = Engine(model, slots=sequences, dtype=dtype)
    steps, slots = engine._steps, list(range(sequences))
    assert isinstance(steps, GraphSteps), "there is no step by itself without a graph"
    for number in slots:
        engine.submit(Request([number + 1], 8, Sampling(temperature=0)))
    engine.step()
    graph, times = steps._graph_for(sequences), {}
    graph.place(slots)
    for positions in (16, 200, 850):
        steps._decoder.lengths_S.fill_(positions)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        times[positions] = round(1e3 * begin.elapsed_time(end) / 20, 1)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=["gpt2", "llama-1b", "tiny"], default="gpt2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--long", type=int, default=0, help="also TTFT of a prompt this long")
    parser.add_argument("--sampled", action="store_true", help=f"top-k {TOP_K} instead of greedy")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], help="systems to leave out")
    parser.add_argument("--steps", action="store_true", help="only time the steps on the device")
    parser.add_argument("--company", type=int, default=0, metavar="N", help="only compare texts")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    theirs = library_model(options.model, device, dtype)
    model, vocab = our_model(theirs, device, dtype), theirs.config.vocab_size
    if options.company:
        print(
            json.dumps(
                in_company(model, options.company, slots=max(options.sequences), dtype=dtype)
            )
        )
        return
    if options.steps:
        for sequences in options.sequences:
            with torch.inference_mode():
                times = step_times(model, sequences, dtype)
            print(json.dumps({"sequences": sequences, "us_by_positions": times}), flush=True)
        return
    speed = copy_speed(device)
    print(
        f"{options.model}, {dtype}, {device}: memory is copied at {speed / 1e9:.0f} GB/s",
        flush=True,
    )
    works = [
        Work(sequences, options.prompt, options.tokens, options.sampled)
        for sequences in options.sequences
    ]
    if options.long:
        works.append(Work(1, options.long, 16, options.sampled))
    rows = []
    titles = "sequences", "TTFT ms", "TPOT ms", "tokens/s", "of bound", "begun s"
    print(" " * 22 + "".join(f"{title:>11}" for title in titles))
    for work in works:
        builders: dict[str, Callable[[], Continue]] = {
            "ours": lambda work=work: ours(model, work, dtype),
            "transformers": lambda work=work: transformers_generate(theirs, work, static=False),
            "transformers, static": lambda work=work: transformers_generate(
                theirs, work, static=True
            ),
            "static": lambda work=work: static_peer(theirs, work),
        }
        bound_s = bound(model, work, dtype, speed)
        for name, build in builders.items():
            if name in options.without:
                continue
            try:
                with torch.inference_mode():
                    row = measure(
                        name, build(), work, vocab=vocab, bound_s=bound_s, repeats=options.repeats
                    )
            except Exception as error:  # a peer that cannot must not end the others
                print(
                    f"{name:22}{work.sequences:>10}  {type(error).__name__}: {str(error)[:200]}",
                    flush=True,
                )
                continue
            rows.append({**asdict(row), "prompt": work.prompt, "tokens": work.tokens})
            print(
                f"{row.system:22}{row.sequences:>11}{row.ttft_ms:>11.1f}{row.tpot_ms:>11.3f}"
                f"{row.tokens_per_s:>11,.0f}{row.bound:>11.1%}{row.begin_s:>11.1f}",
                flush=True,
            )
            torch._dynamo.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    setup = {
        "model": options.model,
        "dtype": str(dtype),
        "device": str(device),
        "copy_GB_s": speed / 1e9,
    }
    print(json.dumps({**setup, "sampled": options.sampled, "rows": rows}))


if __name__ == "__main__":
    main()
