"""How fast text becomes token files, beside three peers on the same text and the same cores.

    python benchmarks/prepare_speed.py TEXT.jsonl --vocab FOLDER \
        --megatron MEGATRON_LM --peer-python PYTHON

    gristmill     gristmill prepare, GPT-2's tokenizer, Megatron's format and nanoGPT's
    Megatron-LM   tools/preprocess_data.py of a checkout, its GPT2BPETokenizer, --append-eod
    datasets      load_dataset("json"), map with tiktoken, ids into one memmap: the
                  way of nanoGPT's OpenWebText script
    tiktoken      nothing but tiktoken and orjson in a process for each core, which take
                  2 MB of lines at a time: as fast as it gets without a better tokenizer

Everything runs as a command of its own, from the start of Python to the end of the files, with one
worker for each core. The files must be the same byte for byte, or the run fails. FOLDER holds
GPT-2's encoder.json and vocab.bpe; PYTHON is one with torch, numpy, six, regex, datasets,
tiktoken and orjson (what the peers need); without --megatron or --peer-python that peer is left
out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATASETS = r"""
import sys
import numpy as np
import tiktoken
from datasets import load_dataset
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

source, output, vocab, workers = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
ENCODING = tiktoken.Encoding(
    "gpt2",
    pat_str=PATTERN,
    mergeable_ranks=data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=f"{vocab}/vocab.bpe", encoder_json_file=f"{vocab}/encoder.json"
    ),
    special_tokens={"<|endoftext|>": 50256},
)


def encode(example):
    ids = ENCODING.encode_ordinary(example["text"])
    ids.append(ENCODING.eot_token)
    return {"ids": ids, "len": len(ids)}


if __name__ == "__main__":
    texts = load_dataset("json", data_files=source, split="train", num_proc=workers)
    done = texts.map(encode, remove_columns=texts.column_names, num_proc=workers)
    total = int(np.sum(done["len"], dtype=np.uint64))
    target = np.memmap(output, dtype=np.uint16, mode="w+", shape=(total,))
    position, pieces = 0, min(1024, len(done))
    for number in range(pieces):
        piece = done.shard(num_shards=pieces, index=number, contiguous=True).with_format("numpy")
        ids = np.concatenate(piece["ids"])
        target[position : position + len(ids)] = ids
        position += len(ids)
    target.flush()
"""

TIKTOKEN = r"""
import multiprocessing
import os
import sys
import numpy as np
import orjson
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

source, output, vocab, workers = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def begin():
    global encoding
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=PATTERN,
        mergeable_ranks=data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=f"{vocab}/vocab.bpe", encoder_json_file=f"{vocab}/encoder.json"
        ),
        special_tokens={"<|endoftext|>": 50256},
    )


def encode(span):
    with open(source, "rb") as file:
        file.seek(span[0])
        lines = file.read(span[1] - span[0]).splitlines()
    ids = []
    for line in lines:
        ids += encoding.encode_ordinary(orjson.loads(line)["text"])
        ids.append(encoding.eot_token)
    return np.array(ids, np.uint16)


def spans():
    size, start = os.path.getsize(source), 0
    with open(source, "rb") as file:
        while start < size:
            file.seek(start + (2 << 20))
            file.readline()
            end = min(file.tell(), size)
            yield start, end
            start = end


if __name__ == "__main__":
    with multiprocessing.Pool(workers, initializer=begin) as pool, open(output, "wb") as file:
        for ids in pool.imap(encode, spans()):
            ids.tofile(file)
"""


def timed(
    command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> float:
    began = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    seconds = time.perf_counter() - began
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stderr[-3000:]}")
    return seconds


def prepare(source: Path, output: Path, arguments: argparse.Namespace, format: str) -> float:
    command = [
        sys.executable, "-m", "gristmill", "prepare", str(source), "-o", str(output),
        "--vocab-file", str(arguments.vocab / "encoder.json"),
        "--merge-file", str(arguments.vocab / "vocab.bpe"),
        "--format", format, "--workers", str(arguments.workers), "--overwrite",
    ]  # fmt: skip
    return min(timed(command) for _ in range(arguments.repeat))


def megatron(source: Path, output: Path, arguments: argparse.Namespace) -> float:
    command = [
        arguments.peer_python, "tools/preprocess_data.py", "--input", str(source),
        "--output-prefix", str(output), "--tokenizer-type", "GPT2BPETokenizer",
        "--vocab-file", str(arguments.vocab / "encoder.json"),
        "--merge-file", str(arguments.vocab / "vocab.bpe"),
        "--append-eod", "--workers", str(arguments.workers),
    ]  # fmt: skip
    return timed(command, cwd=arguments.megatron)


def datasets(source: Path, output: Path, arguments: argparse.Namespace, folder: Path) -> float:
    script = folder / "peer.py"
    script.write_text(DATASETS)
    command = [
        arguments.peer_python, str(script), str(source), str(output), str(arguments.vocab),
        str(arguments.workers),
    ]  # fmt: skip
    # A cache of an earlier run would be taken for work that was done.
    return timed(command, env=os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"})


def tiktoken(source: Path, output: Path, arguments: argparse.Namespace, folder: Path) -> float:
    script = folder / "tiktoken_pool.py"
    script.write_text(TIKTOKEN)
    command = [
        arguments.peer_python, str(script), str(source), str(output), str(arguments.vocab),
        str(arguments.workers),
    ]  # fmt: skip
    return timed(command)


def refuse_different(ours: Path, theirs: Path) -> None:
    if ours.read_bytes() != theirs.read_bytes():
        sys.exit(f"{ours.name} and {theirs.name} differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=3, help="ours, best of so many")
    arguments = parser.parse_args()
    source, size = arguments.text.resolve(), arguments.text.stat().st_size / 1e6
    arguments.vocab = arguments.vocab.resolve()
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for format, name in (("megatron", "meg"), ("flat", "flat")):
            seconds = prepare(source, folder / name, arguments, format)
            rows.append((f"gristmill, {format}", seconds, seconds))
        if arguments.peer_python and arguments.megatron:
            seconds = megatron(source, folder / "theirs", arguments)
            rows.append(("Megatron-LM preprocess_data.py", seconds, rows[0][1]))
            for ending in (".bin", ".idx"):
                refuse_different(
                    folder / f"meg_text_document{ending}", folder / f"theirs_text_document{ending}"
                )
        if arguments.peer_python:
            seconds = datasets(source, folder / "datasets.bin", arguments, folder)
            rows.append(("datasets.map with tiktoken", seconds, rows[1][1]))
            refuse_different(folder / "flat.bin", folder / "datasets.bin")
            seconds = tiktoken(source, folder / "tiktoken.bin", arguments, folder)
            rows.append(("tiktoken in a process for each core", seconds, rows[1][1]))
            refuse_different(folder / "flat.bin", folder / "tiktoken.bin")
    print(f"{size:.1f} MB of JSON lines, {arguments.workers} workers; same bytes from all")
    print(f"{'':36} {'seconds':>9} {'MB/s':>9} {'ours is':>9}")
    for name, seconds, ours in rows:
        print(f"{name:36} {seconds:9.2f} {size / seconds:9.1f} {seconds / ours:8.1f}x")


if __name__ == "__main__":
    main()
