"""Token sets in a bucket: put there, brought back, and never half there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli.main import app
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.tokenizers.tokenizer import ByteTokenizer
from gristmill.tokens import remote
from gristmill.tokens.remote import download_set, upload_set
from gristmill.tokens.store import open_tokens, verify_tokens

COMPANIONS = (".ledger.json", ".tokenizer/gristmill_tokenizer.json", ".tokenizer/none.json")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A set as `prepare` leaves it, of several files."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {n} " * 30}) + "\n" for n in range(900)))
    prefix = tmp_path / "made" / "set"
    options: dict[str, Any] = {"format": "npy", "shard_size": 100_000, "workers": 1}
    prepare(PrepareRequest([str(text)], prefix, ByteTokenizer(), **options))
    return prefix


def files(prefix: Path) -> dict[str, str]:
    return {
        str(file.relative_to(prefix.parent)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(prefix.parent.rglob("*"))
        if file.is_file()
    }


def base(kind: str) -> str:
    pytest.importorskip({"s3": "s3fs", "gs": "gcsfs.core"}[kind])
    return f"{kind}://box/sets"


@pytest.mark.parametrize("kind", ["s3", pytest.param("gs", marks=pytest.mark.slow)])
def test_there_and_back_again(store: Any, made: Path, tmp_path: Path, kind: str) -> None:
    url = f"{base(kind)}/x"
    seen: list[tuple[int, int]] = []
    upload_set(made, url, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    there = {path.removeprefix("box/sets/x"): path for path in store.objects}
    assert {".json", "_000001.npy", "_000002.npy", ".starts", ".ledger.json"} <= there.keys()
    # The manifest came last.
    assert list(store.objects)[-1] == "box/sets/x.json"
    back = tmp_path / "back" / "y"
    download_set(url, back, companions=COMPANIONS)
    mine = {name.replace("set", "y", 1): digest for name, digest in files(made).items()}
    theirs = files(back)
    assert theirs == {name: digest for name, digest in mine.items() if name in theirs}
    assert verify_tokens(back) == [] and theirs.keys() >= {"y.json", "y.ledger.json"}
    assert theirs.keys() >= {"y.tokenizer/gristmill_tokenizer.json"} and len(theirs) == len(mine)


def test_from_the_web_it_resumes_where_it_broke(
    store: Any, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PIECE", 50_000)
    for name in files(made):
        store.put(f"sets/{name}", (made.parent / name).read_bytes())
    back = tmp_path / "back" / "set"
    url = f"{store.url}/sets/set"
    store.on_request = lambda path: (
        store.cut(path, after=0) if "000002" in path and len(store.asked("000002")) > 2 else None
    )
    with pytest.raises(UserError, match="cannot be reached"):
        download_set(url, back)
    assert not back.with_name("set.json").exists() and not list(back.parent.glob("set*"))
    store.on_request, store.faults = lambda path: None, []
    store.requests.clear()
    download_set(url, back)
    assert verify_tokens(back) == [] and not store.asked("000001")
    assert store.asked("000002", "bytes=1") and not store.asked("000002", "bytes=0-1")
    assert not list(back.parent.glob(".set*")), "nothing is left behind"


def test_a_set_is_replaced_when_asked_only(store: Any, made: Path, tmp_path: Path) -> None:
    url = f"{base('s3')}/x"
    upload_set(made, url)
    before = dict(store.objects)
    upload_set(made, url)
    assert store.objects == before and len(store.asked("PUT /box/sets/x.json")) == 1
    other = tmp_path / "other" / "set"
    (tmp_path / "t.txt").write_text("other text")
    prepare(PrepareRequest([str(tmp_path / "t.txt")], other, ByteTokenizer(), workers=1))
    with pytest.raises(UserError, match="already a token set") as caught:
        upload_set(other, url)
    assert caught.value.exit is Exit.REFUSED and store.objects == before
    upload_set(other, url, overwrite=True)
    with pytest.raises(UserError, match="already a token set"):
        download_set(url, made)
    download_set(url, made, overwrite=True)
    assert open_tokens(made).info == open_tokens(other).info


def test_damage_on_the_way_is_found(store: Any, made: Path, tmp_path: Path) -> None:
    url = f"{base('s3')}/x"
    store.spoil("x_000001.npy", "lost")
    upload_set(made, url)  # one bit was lost on the way, and the file was sent again
    assert len(store.asked("PUT /box/sets/x_000001.npy")) == 2
    store.spoil("x_000001.npy", "lost", times=1000)
    store.objects.clear()
    with pytest.raises(UserError, match="not what was sent"):
        upload_set(made, url)
    assert "box/sets/x.json" not in store.objects
    store.faults.clear()
    upload_set(made, url)
    content = store.objects["box/sets/x_000002.npy"]
    store.put("box/sets/x_000002.npy", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="not what the manifest says"):
        download_set(url, tmp_path / "back" / "y")
    assert not (tmp_path / "back" / "y.json").exists()


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, UserError):
        return int(result.exception.exit), str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(400)))
    return file


def test_prepare_writes_into_a_bucket(store: Any, corpus: Path, tmp_path: Path) -> None:
    url = f"{base('s3')}/x"
    words = ["prepare", corpus, "-t", "bytes", "--workers", 1, "--split", "9,1"]
    status, output = run(*words, "-o", url)
    assert status == 0 and f"{url}_train: " in output and f"{url}_val: " in output
    assert not (tmp_path / ".gristmill-uploads").exists()
    run(*words, "-o", tmp_path / "local")
    for split in ("train", "val"):
        for suffix in (".bin", ".starts", ".tokenizer/gristmill_tokenizer.json"):
            local = Path(f"{tmp_path / 'local'}_{split}{suffix}").read_bytes()
            assert store.objects[f"box/sets/x_{split}{suffix}"] == local
    assert store.objects["box/sets/x.ledger.json"]
    status, error = run(*words, "-o", url)
    assert status == Exit.REFUSED and "already a token set" in error
    assert not (tmp_path / ".gristmill-uploads" / "s3" / "box" / "sets" / "x.bin").exists()
    assert run(*words, "-o", url, "--overwrite")[0] == 0


def test_parts_are_merged_here_and_put_there(store: Any, corpus: Path, tmp_path: Path) -> None:
    url = f"{base('s3')}/x"
    words = ["prepare", corpus, "-t", "bytes"]
    status, _ = run(*words, "-o", url, "--parts", 2, "--engine", "local", "--quiet")
    assert status == 0 and not (tmp_path / ".gristmill-uploads").exists()
    run(*words, "-o", tmp_path / "local", "--workers", 1)
    assert store.objects["box/sets/x.bin"] == (tmp_path / "local.bin").read_bytes()
    status, error = run(*words, "-o", url, "--part", "1/2", "--overwrite")
    assert status == Exit.USAGE and "gristmill tokens copy" in error


def test_an_upload_that_broke_goes_on(store: Any, corpus: Path, tmp_path: Path) -> None:
    url = f"{base('s3')}/x"
    words = ["prepare", corpus, "-t", "bytes", "--workers", 1, "-o", url]
    store.refuse("x.starts", 403, times=1000)
    status, error = run(*words)
    assert status == Exit.DATA and "x.starts" in error and "box/sets/x.json" not in store.objects
    other = [*words[:2], "-t", "gpt2", *words[4:]]
    assert run(*other)[0] == Exit.REFUSED
    store.faults.clear()
    corpus_time = corpus.stat().st_mtime_ns
    status, output = run(*words)
    assert status == 0 and f"{url}: " in output and corpus.stat().st_mtime_ns == corpus_time
    assert len(store.asked("PUT /box/sets/x.bin")) == 1, "not sent again"
    assert store.objects["box/sets/x.json"]


def test_what_cannot_be_written_is_refused_before_any_work(
    store: Any, corpus: Path, tmp_path: Path
) -> None:
    def refused(place: str) -> str:
        status, error = run("prepare", corpus, "-t", "bytes", "--workers", 1, "-o", place)
        assert status != 0
        assert not list(tmp_path.rglob("*.bin")), "nothing was prepared"
        return error

    assert "cannot be written to hf://" in refused("hf://datasets/a/b/x")
    assert "cannot be written to https://" in refused("https://host/x")
    store.refuse("x.writable", 403, times=1000)
    assert "refuses" in refused(f"{base('s3')}/x")
    assert "need a name" in refused(f"{base('s3')}/")
    for verb in (["tokens", "convert", corpus, "--format", "npy"], ["tokens", "merge", corpus]):
        status, error = run(*verb, "-o", "s3://box/x")
        assert status != 0 and "gristmill tokens copy" in error


def test_a_set_elsewhere_is_not_opened(make_run: Callable[..., Any]) -> None:
    for address in ("s3://box/sets/x", "https://user:hunter2@host/x?sig=hunter2"):
        with pytest.raises(UserError, match="gristmill tokens copy ADDRESS") as caught:
            open_tokens(address)
        assert "hunter2" not in str(caught.value)
    status, error = run("tokens", "inspect", "s3://box/sets/x")
    assert status == Exit.DATA and "s3://box/sets/x" in error and "tokens copy" in error
    from gristmill.train.run import Run

    with pytest.raises(UserError, match="tokens copy"):
        Run(make_run('data.paths="s3://box/sets/x"')).train()
