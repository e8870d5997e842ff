"""Models and tokenizers by name: downloaded once, at the revision asked for, and nothing that could
run; what goes wrong is told in one line."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.base.errors import Exit

NAME = "someone/tiny"
SAFE = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def generate(name: str = NAME) -> tuple[str, ...]:
    return ("generate", name, "Once", "-n", "8", "--temperature", "1", "--device", "cpu")


def show(name: str = NAME) -> tuple[str, ...]:
    return ("tokenizer", "show", name)


def test_a_model_comes_once_and_stays(hub: Any, machine: Any, model_files: Any) -> None:
    commit = hub.model(NAME, model_files).branches["main"]
    first = machine.run(*generate())
    assert first.done and first.errors == "" and first.output.startswith("Once")
    assert machine.cached == SAFE
    count = len(hub.requests)
    assert machine.run(*generate(), HF_HUB_OFFLINE="1") == first
    assert machine.run(*generate(f"{NAME}@{commit}")) == first
    assert len(hub.requests) == count
    hub.close()
    assert machine.run(*generate()) == first


def test_revisions(hub: Any, machine: Any, model_files: Any) -> None:
    repository = hub.model(NAME, model_files)
    repository.tag("v1.0")
    old = repository.branches["main"]
    repository.commit({**model_files, "tokenizer_config.json": '{"eos_token": "a"}'})
    names = (NAME, f"{NAME}@main", f"{NAME}@v1.0", f"{NAME}@{old}")
    *shown, unknown, model = machine.run_all(
        *map(show, names), show(f"{NAME}@v2"), generate(f"{NAME}@v2")
    )
    ends = [one.output.splitlines()[2].split()[-1] for one in shown if one.done]
    assert ends == ["a", "a", "<|endoftext|>", "<|endoftext|>"]
    assert "model.safetensors" not in machine.cached
    missing = f"the model '{NAME}' has no revision 'v2'; it has: main, v1.0"
    assert unknown.fails(f"error: the tokenizer: {missing}", f"such as {NAME}@main")
    assert model.fails(f"error: MODEL: {missing}")


def test_settings_need_no_weights(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    run = machine.work / "run.toml"
    run.write_text(
        f'name = "x"\n[model]\nstart = "{NAME}@main"\n'
        '[data]\npaths = "x"\n[train]\nuntil = "1 step"\nbatch = 1\n'
    )
    shown = machine.run("config", str(run))
    assert shown.done
    assert "width = 16" in shown.output and f'start = "{NAME}@main"' in shown.output
    assert machine.cached == SAFE - {"model.safetensors"}
    assert not hub.asked("safetensors")


def test_an_old_name_leads_to_the_new_one(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    hub.move("models", "tiny", to=NAME)
    shown = machine.run(*show("tiny"))
    assert shown.done and "257" in shown.output and shown.errors == ""


def test_a_tokenizer_that_has_to_be_converted(hub: Any, machine: Any) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    files = {"vocab.txt": "\n".join(words), "config.json": '{"model_type": "bert"}'}
    hub.model("someone/words", {**files, "pytorch_model.bin": b"a pickle"})
    shown = machine.run(*show("someone/words"), "--end-of-text", "[SEP]")
    assert shown.done and "ids          13" in shown.output and shown.errors == ""
    assert machine.cached == files.keys()


def test_gated(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files, gated=True)
    page = f"{hub.url}/{NAME}"
    accept = f"accept it at {page}, then log in: `hf auth login`"
    model, tokenizer = machine.run_all(generate(), show())
    assert model.fails(f"error: MODEL: the model '{NAME}' is gated", accept)
    assert tokenizer.fails("is gated", accept)
    stranger = machine.run(*show(), HF_TOKEN="hf_stranger")
    assert stranger.fails("your account has no access", f"ask for access at {page}")
    wrong = machine.run(*show(), HF_TOKEN="hf_wrong")
    assert wrong.fails("Hugging Face does not accept your token", "hf auth login")
    assert machine.run(*generate(), HF_TOKEN="hf_reader").done


@pytest.mark.parametrize("token", ["", "hf_reader"])
def test_no_such_repository(hub: Any, machine: Any, token: str) -> None:
    missing = f"there is no model '{NAME}' on Hugging Face, or it is private"
    model, tokenizer = machine.run_all(generate(), show(), **({"HF_TOKEN": token} if token else {}))
    assert model.fails(missing, "give a run folder", "hf auth login")
    assert tokenizer.fails(missing, 'give "bytes", "gpt2"')


def test_what_is_no_name_is_not_asked_for(hub: Any, machine: Any) -> None:
    names = ("runs/first/checkpoints", "./runs", "/no/such/run", "a b")
    for name, finished in zip(names, machine.run_all(*map(generate, names)), strict=True):
        assert finished.fails(f"there is no folder '{name}'", "give a run folder")
    assert hub.requests == []


def test_too_many_requests(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    hub.refuse("/api/models/", times=2)
    hub.refuse("tokenizer.json", times=1)
    patient = machine.run(*show())
    assert patient.done and "257" in patient.output
    assert patient.notes == ["Hugging Face: too many requests; trying again in 0.0s"]


def test_a_hub_that_refuses_for_good(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    for status, message in ((429, "too many requests from here"), (500, "answers with status 500")):
        hub.requests.clear()
        hub.faults.clear()
        hub.refuse("/api/models/", times=99, status=status)
        refused = machine.run(*generate())
        assert refused.fails(f"{message}: tried 5 times in ")
        assert len(refused.notes) == 1 and len(hub.requests) == 5
    hub.requests.clear()
    hub.faults.clear()
    hub.refuse("/api/models/", times=99, retry_after=3600)
    assert machine.run(*generate()).fails("too many requests from here: tried 1 time in ")
    assert len(hub.requests) == 1


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_connection_is_resumed(hub: Any, machine: Any, model_files: Any, reset: bool) -> None:
    hub.model(NAME, model_files)
    hub.cut("model.safetensors", times=1, after=2000, reset=reset)
    cut = machine.run(*generate())
    assert cut.done and hub.faults[0].times == 0
    stored = next(machine.home.rglob("model.safetensors"))
    assert stored.read_bytes() == model_files["model.safetensors"]


def test_a_large_file_goes_on_where_it_was_cut(hub: Any, machine: Any, model_files: Any) -> None:
    # The library writes pieces of 10 MiB.
    large = bytes(range(256)) * (12 << 12)
    hub.model(NAME, {**model_files, "model.safetensors": large})
    hub.cut("model.safetensors", times=1, after=11 << 20)
    machine.run(*generate())
    assert hub.asked("GET", "model.safetensors", f"bytes={10 << 20}-")
    stored = next(machine.home.rglob("model.safetensors"))
    assert stored.read_bytes() == large


def test_no_network(hub: Any, machine: Any) -> None:
    hub.close()
    how = f"run `hf download {NAME} --revision v1`"
    for finished in machine.run_all(generate(f"{NAME}@v1"), show(f"{NAME}@v1")):
        assert finished.fails(f"'{NAME}@v1' is not in the cache", f"{hub.url} cannot be reached")
        assert finished.fails(how, str(machine.home / "huggingface" / "hub"))
        assert finished.notes == []
    offline = machine.run(*generate(), HF_HUB_OFFLINE="1")
    assert offline.fails(f"'{NAME}' is not in the cache, and HF_HUB_OFFLINE is set", "unset")


def test_a_part_in_the_cache_is_told(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    assert machine.run(*show()).done
    hub.close()
    tokenizer, model = machine.run_all(show(), generate())
    assert tokenizer.done
    assert model.fails("the cache holds only a part of 'someone/tiny'", "(model.safetensors)")


def test_only_settings_in_the_cache(hub: Any, machine: Any, model_files: Any) -> None:
    """As after another program has asked for config.json alone: no list of files is kept."""
    hub.model(NAME, model_files)
    ask = f"huggingface_hub.hf_hub_download({NAME!r}, 'config.json')"
    assert machine.run("python", f"import huggingface_hub\n{ask}").status == 0
    hub.close()
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        model = machine.run(*generate(), **environment)
        assert model.fails(
            "the cache holds only the settings of 'someone/tiny', and no .safetensors file",
            f"with network; without one, run `hf download {NAME}` where there is one",
        )


def test_a_full_disk(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, {**model_files, "model.safetensors": bytes(200_000)})
    full = machine.run(*generate(), file_limit=100_000)
    assert full.fails("the disk is full", "set HF_HOME to a folder", status=Exit.STORAGE)
    assert full.fails(str(machine.home / "huggingface" / "hub"), status=Exit.STORAGE)
    assert "model.safetensors" not in machine.cached


def test_progress_is_shown(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, model_files)
    shown, again = machine.run_all(generate(), generate(), seconds_between_lines=0)
    assert shown.done and shown.notes
    assert all(note.startswith(f"downloading {NAME}: ") for note in shown.notes), shown.notes
    assert "100% " in shown.notes[-1]
    assert again.notes == []


def test_pickled_weights_are_refused(hub: Any, machine: Any, model_files: Any) -> None:
    hub.model(NAME, {k: v for k, v in model_files.items() if not k.endswith(".safetensors")})
    refused = machine.run(*generate())
    assert refused.fails("has no .safetensors file; pickled", "give a model or a revision")
    assert "pytorch_model.bin" not in machine.cached
