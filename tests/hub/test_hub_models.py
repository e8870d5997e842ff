"""Models and tokenizers by name: downloaded once, at the revision asked for, and nothing that could
run; what goes wrong is told in one line."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.base.errors import Exit

NAME = "someone/tiny"
SAFE = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def generate(machine: Any, name: str = NAME, **options: Any) -> Any:
    words = ("-n", "8", "--temperature", "1", "--device", "cpu")
    return machine.run("generate", name, "Once", *words, **options)


def fails(finished: Any, *parts: str, status: Exit = Exit.DATA) -> None:
    """One error in two lines, the second with the remedy, and nothing else."""
    assert finished.status == status, finished.errors
    assert finished.errors == finished.error + "\n", finished.errors
    assert len(finished.error.splitlines()) == 2
    for part in parts:
        assert part in finished.error


def test_a_model_comes_once_and_stays(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    first = generate(machine)
    assert (first.status, first.errors) == (0, "") and first.output.startswith("Once")
    assert machine.cached == SAFE
    count = len(hub.requests)
    assert generate(machine, HF_HUB_OFFLINE="1") == first
    assert len(hub.requests) == count
    hub.close()
    assert generate(machine) == first


def test_revisions(hub: Any, machine: Any, model_files: Any) -> None:
    repository = hub.model(NAME, model_files)
    repository.tag("v1.0")
    old = repository.branches["main"]
    repository.commit({**model_files, "tokenizer_config.json": '{"eos_token": "Ġ"}'})
    for name, end in {
        NAME: "' '",
        f"{NAME}@main": "' '",
        f"{NAME}@v1.0": "<|endoftext|>",
        f"{NAME}@{old}": "<|endoftext|>",
    }.items():
        shown = machine.run("tokenizer", "show", name)
        assert shown.status == 0, shown.errors
        line = next(line for line in shown.output.splitlines() if line.startswith("end of text"))
        assert ("<|endoftext|>" in line) == ("<|endoftext|>" in end)
    assert "model.safetensors" not in machine.cached
    missing = "'someone/tiny' has no revision 'v2'; it has: main, v1.0"
    fails(machine.run("tokenizer", "show", f"{NAME}@v2"), missing, "someone/tiny@main")
    fails(generate(machine, f"{NAME}@v2"), missing)


def test_settings_need_no_weights(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    run = machine.work / "run.toml"
    run.write_text(f'name = "x"\n[model]\nstart = "{NAME}@main"\n[train]\nuntil = "1 step"\n')
    shown = machine.run("config", str(run))
    assert shown.status == 0, shown.errors
    assert "width = 16" in shown.output and f'start = "{NAME}@main"' in shown.output
    assert machine.cached == SAFE - {"model.safetensors"}
    assert not hub.asked("safetensors")


def test_an_old_name_leads_to_the_new_one(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    hub.move("models", "tiny", to=NAME)
    shown = machine.run("tokenizer", "show", "tiny")
    assert (shown.status, shown.errors) == (0, "") and "257" in shown.output


def test_gated(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files, gated=True)
    page = f"{hub.url}/{NAME}"
    accept = f"accept it at {page}, then log in: `hf auth login`"
    fails(generate(machine), f"MODEL: the model '{NAME}' is gated", accept)
    stranger = generate(machine, HF_TOKEN="hf_stranger")
    fails(stranger, "your account has no access", f"ask for access at {page}")
    assert generate(machine, HF_TOKEN="hf_reader").status == 0


@pytest.mark.parametrize("token", ["", "hf_reader"])
def test_no_such_repository(hub: Any, machine: Any, token: str) -> None:
    missing = f"there is no model '{NAME}' on Hugging Face, or it is private"
    options = {"HF_TOKEN": token} if token else {}
    fails(generate(machine, **options), missing, "give a run folder", "hf auth login")
    shown = machine.run("tokenizer", "show", NAME, **options)
    fails(shown, missing, 'give "bytes", "gpt2"')


def test_what_is_no_name_is_not_asked_for(hub: Any, machine: Any) -> None:
    for name in ("runs/first/checkpoints", "./runs", "/no/such/run", "a b"):
        fails(generate(machine, name), f"there is no folder '{name}'", "give a run folder")
    assert hub.requests == []


def test_too_many_requests(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    hub.refuse("/api/models/", times=2)
    hub.refuse("tokenizer.json", times=1)
    patient = machine.run("tokenizer", "show", NAME)
    assert patient.status == 0 and "257" in patient.output
    notes = patient.errors.splitlines()
    assert notes[:2] == ["Hugging Face: too many requests; trying again in 0.0s"] * 2
    assert all(note.startswith("Hugging Face: too many requests; ") for note in notes)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (429, "too many requests from here: tried 5 times"),
        (500, "status 500: tried 5 times"),
    ],
)
def test_a_hub_that_refuses_for_good(
    hub: Any, machine: Any, model_files: Any, status: int, message: str
) -> None:
    hub.model(NAME, model_files)
    hub.refuse("/api/models/", times=99, status=status)
    refused = generate(machine)
    assert refused.status == Exit.DATA and message in refused.error
    assert len(refused.errors.splitlines()) == 4 + 2
    assert len(hub.requests) == 5


def test_a_wait_of_an_hour_is_not_waited(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    hub.refuse("/api/models/", times=99, retry_after=3600)
    fails(generate(machine), "too many requests from here", "wait")
    assert len(hub.requests) == 1


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_connection_is_resumed(hub: Any, machine: Any, model_files: Any, reset: bool) -> None:
    hub.model(NAME, model_files)
    hub.cut("model.safetensors", times=2, after=2000, reset=reset)
    hub.cut("tokenizer.json", times=1, after=100, reset=reset)
    cut = generate(machine)
    assert cut.status == 0, cut.errors
    assert machine.cached == SAFE
    stored = next(machine.home.rglob("model.safetensors"))
    assert stored.read_bytes() == model_files["model.safetensors"]


def test_a_large_file_goes_on_where_it_was_cut(hub: Any, machine: Any, model_files: Any) -> None:
    # The library writes pieces of 10 MiB.
    large = bytes(range(256)) * (12 << 12)
    hub.model(NAME, {**model_files, "model.safetensors": large})
    hub.cut("model.safetensors", times=1, after=11 << 20)
    generate(machine)
    assert hub.asked("GET", "model.safetensors", f"bytes={10 << 20}-")
    stored = next(machine.home.rglob("model.safetensors"))
    assert stored.read_bytes() == large


def test_no_network(hub: Any, machine: Any) -> None:
    hub.close()
    how = f"run `hf download {NAME} --revision v1`"
    for finished in (
        generate(machine, f"{NAME}@v1"),
        machine.run("tokenizer", "show", f"{NAME}@v1"),
    ):
        fails(finished, f"'{NAME}@v1' is not in the cache", f"{hub.url} cannot be reached", how)
    offline = generate(machine, HF_HUB_OFFLINE="1")
    fails(offline, f"'{NAME}' is not in the cache, and HF_HUB_OFFLINE is set", "unset")


def test_a_part_in_the_cache_is_told(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    assert machine.run("tokenizer", "show", NAME).status == 0
    hub.close()
    assert machine.run("tokenizer", "show", NAME).status == 0
    fails(generate(machine), "holds only a part", "model.safetensors")


def test_a_full_disk(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, {**model_files, "model.safetensors": bytes(200_000)})
    full = generate(machine, file_limit=100_000)
    fails(full, "the disk is full", "set HF_HOME to a folder", status=Exit.STORAGE)
    assert str(machine.home / "huggingface" / "hub") in full.error
    assert "model.safetensors" not in machine.cached


def test_progress_is_shown(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    shown = generate(machine, seconds_between_lines=0)
    total = sum(len(model_files[name]) for name in SAFE)
    assert f"downloading {NAME}: 100% " in shown.errors, shown.errors
    assert total > 0
    again = generate(machine, seconds_between_lines=0)
    assert again.errors == ""


def test_pickled_weights_are_refused(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, {k: v for k, v in model_files.items() if not k.endswith(".safetensors")})
    refused = generate(machine)
    assert refused.status == Exit.DATA and "no .safetensors file here" in refused.error
    assert "pytorch_model.bin" not in machine.cached
