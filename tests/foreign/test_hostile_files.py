"""Files that were made to harm, or were damaged: one error, nothing run, nothing left."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.base.errors import DataError
from gristmill.foreign.folder import open_checkpoint
from gristmill.foreign.pickled import PickledObject, read_pickle
from gristmill.foreign.torch_file import PickledTensor, read_torch_file, tensors_below


class Runs:
    """Unpickled by Python, it calls something."""

    def __init__(self, called: Any, *arguments: Any) -> None:
        self._reduced = (called, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


class SetsState:
    """Unpickled by Python, its state is given to a method of its class."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("it was run")

    def __reduce__(self) -> Any:
        return (SetsState, (), {"x": 1})


HARM = {
    "os.system": Runs(os.system, "touch HARM"),
    "builtins.eval": Runs(eval, "open('HARM', 'w')"),
    "builtins.exec": Runs(exec, "open('HARM', 'w')"),
    "builtins.getattr": Runs(getattr, dict, "get"),
    "builtins.__import__": Runs(__import__, "os"),
    "setstate": SetsState(),
    "torch.load": Runs(torch.load, "HARM"),
    "torch.hub.load": Runs(torch.hub.load, "x/y", "z"),
    "in a container": {"model": [{"deep": (Runs(os.system, "touch HARM"),)}]},
    "as a key": {Runs(os.system, "touch HARM"): 1},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def zip_of(path: Path, entries: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def pickled_as(name: str, data: bytes) -> dict[str, bytes]:
    return {f"{name}/data.pkl": data, f"{name}/byteorder": b"little", f"{name}/version": b"3\n"}


@pytest.mark.parametrize("name", HARM)
@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_calls_are_refused_by_name(tmp_path: Path, name: str, protocol: int) -> None:
    data = pickle.dumps({"model": {}, "model_args": HARM[name]}, protocol=protocol)
    path = zip_of(tmp_path / "ckpt.pt", pickled_as("archive", data))
    with pytest.raises(DataError, match="which no checkpoint needs; it was not run") as caught:
        open_checkpoint(path)
    assert len(caught.value.problems) == 1
    assert not Path("HARM").exists()


def test_the_names_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"names (posix|nt)\.system"):
        read_pickle(pickle.dumps(HARM["os.system"]), where="x")
    with pytest.raises(DataError, match=r"names builtins\.eval"):
        read_pickle(pickle.dumps(HARM["builtins.eval"]), where="x")


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'touch HARM'\ntR.",
        b"(S'touch HARM'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch HARM'\no.",
        b"cmegatron.x\ny\ncos\nsystem\nb.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02ls\x85R.",
        b"\x80\x04\x8c\x08megatron\x8c\x0d__builtins__.e\x93.",
    ],
)
def test_every_way_to_name_something_is_checked(code: bytes) -> None:
    with pytest.raises(DataError):
        read_pickle(code, where="x")
    assert not Path("HARM").exists()


def test_names_on_the_list_are_neither_imported_nor_called() -> None:
    value = read_pickle(b"cmegatron.no.such.module\nrun\n(I1\ntR.", where="x")
    assert isinstance(value, PickledObject)
    assert (value.name, value.arguments) == ("megatron.no.such.module.run", (1,))
    # A call of what a call gave, and attributes of what is no object.
    for code in (b"cmegatron\nf\n(tR(tR.", b"]}b.", b"I1\n}b.", b"]]I1\na\x86a."):
        with pytest.raises(DataError):
            read_pickle(code, where="x")


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b".",
        b"(.",
        b"I1\nI2\n.",
        b"\x80\x02}q\x00X\xff\xff\xff\x7f",
        b"}]I1\ns.",
        b"h\x05.",
        b"(I1\nd.",
        b"\x82\x01.",
        b"\x98.",
        b"I1\nQ.",
        b"\x80\x02(tQ.",
        b"0.",
        b"1.",
        b"L" + b"9" * 5000 + b"L\n.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ],
)
def test_nonsense_is_one_error(code: bytes) -> None:
    with pytest.raises(DataError) as caught:
        read_pickle(code, where="file")
    assert len(caught.value.problems) == 1 and caught.value.problems[0].where == "file"


def test_deep_keys_and_repeated_copies_are_refused() -> None:
    deep = b"N" + b"\x85" * 200_000
    with pytest.raises(DataError, match="no plain value"):
        read_pickle(b"}" + deep + b"I1\ns.", where="x")
    many = b"c__builtin__\nlist\nq\x01(" + b"N" * 20_000 + b"tq\x020" + b"h\x01h\x02\x85R0" * 1000
    with pytest.raises(DataError, match="copies more values"):
        read_pickle(many + b"N.", where="x")


def test_dictionaries_without_an_end(tmp_path: Path) -> None:
    value: dict[str, Any] = {}
    value["again"] = value
    with pytest.raises(DataError, match="holds itself"):
        read_pickle(pickle.dumps(value, protocol=2), where="x")
    with pytest.raises(DataError, match="no end"):
        read_pickle(pickle.dumps({"x": _laughs(12)}, protocol=2), where="x")
    wide = read_pickle(pickle.dumps({"x": _laughs(6)}, protocol=2), where="x")
    for hostile in (wide, {"n" * 100: {"m" * 1000: {}}}):
        with pytest.raises(DataError, match="no end"):
            tensors_below(hostile, where=tmp_path)


def _laughs(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {str(number): inner for number in range(10)}
    return inner


def test_what_checkpoints_hold_is_read() -> None:
    value = {
        "args": argparse.Namespace(num_layers=2, name="x", inner={"a": (1, 2.5, None, True)}),
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, {"b": [1]}),
        "set": {1},
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "bytes": b"\x00\xff",
    }
    for protocol in (2, 4, 5):
        found = read_pickle(pickle.dumps(value, protocol=protocol), where="x")
        assert found["args"].name == "argparse.Namespace"
        assert found["args"].fields == vars(value["args"])  # type: ignore[arg-type]
        assert found["ordered"] == {"a": 1} and found["default"] == {"b": [1]}
        assert found["set"] == [1] and found["size"] == (2, 3) and found["bytes"] == b"\x00\xff"
        assert found["dtype"].name == "torch.bfloat16"


# ------------------------------------------------------------------ archives


def saved(tmp_path: Path, value: Any) -> Path:
    torch.save(value, tmp_path / "file.pt")
    return tmp_path / "file.pt"


def test_tensors_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    value = {
        "whole": base,
        "transposed": base.T,
        "slice": base[1:3, ::2],
        "half": base.half(),
        "brain": base.bfloat16(),
        "parameter": torch.nn.Parameter(base.double()),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "bool": torch.tensor([True, False]),
    }
    path = saved(tmp_path, value)
    found = read_torch_file(path)
    for name, tensor in value.items():
        assert isinstance(found[name], PickledTensor)
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].read(), tensor.detach())


def rewritten(path: Path, change: Any) -> Path:
    """The same archive with other entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {one.filename: archive.read(one) for one in archive.infolist()}
    return zip_of(path.with_name("changed.pt"), change(entries))


def persistent(tmp_path: Path, arguments: bytes) -> Path:
    """A file with one storage of four numbers and a tensor that is rebuilt with these arguments."""
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpuK\x04tQ"
    )
    code = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + arguments + b"tR."
    entries = {**pickled_as("a", code), "a/data/0": struct.pack("<4f", 1, 2, 3, 4)}
    return zip_of(tmp_path / "one.pt", entries)


def test_tensors_within_their_storage(tmp_path: Path) -> None:
    found = read_torch_file(persistent(tmp_path, b"K\x00K\x02K\x02\x86K\x02K\x01\x86\x89N"))
    assert found.read().tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "arguments",
    [
        b"K\x01K\x02K\x02\x86K\x02K\x01\x86\x89N",  # one too far
        b"K\x00K\x02K\x02\x86K\x04K\x01\x86\x89N",  # a stride that is too large
        b"K\x00K\xc8K\xc8\x86K\x00K\x00\x86\x89N",  # a stride of 0
        b"J\xff\xff\xff\xffK\x02\x85K\x01\x85\x89N",  # a negative offset
        b"K\x00K\x02\x85J\xff\xff\xff\xff\x85\x89N",  # a negative stride
        b"K\x00K\x02\x85K\x01K\x01\x86\x89N",  # more strides than sizes
        b"K\x00X\x01\x00\x00\x002\x85K\x01\x85\x89N",  # a size that is text
        b"K\x00NN\x89N",
        b"K\x00",
    ],
)
def test_tensors_beyond_their_storage(tmp_path: Path, arguments: bytes) -> None:
    with pytest.raises(DataError):
        read_torch_file(persistent(tmp_path, arguments))


def test_storages_of_another_size(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(100)})

    def cut(entries: dict[str, bytes]) -> dict[str, bytes]:
        return {n: d[:-4] if "/data/" in n else d for n, d in entries.items()}

    def lost(entries: dict[str, bytes]) -> dict[str, bytes]:
        return {n: d for n, d in entries.items() if "/data/" not in n}

    with pytest.raises(DataError, match="396 bytes, not 100"):
        read_torch_file(rewritten(path, cut))
    with pytest.raises(DataError, match="no storage '0'"):
        read_torch_file(rewritten(path, lost))


def test_names_that_lead_elsewhere_and_compressed_entries(tmp_path: Path) -> None:
    good = pickled_as("a", pickle.dumps({}, protocol=2))
    for name in ("../evil", "a/../../evil", "/etc/evil"):
        with pytest.raises(DataError, match="an entry of the archive is named"):
            read_torch_file(zip_of(tmp_path / "x.pt", {**good, name: b"x"}))
    bomb = {**good, "a/data/0": bytes(10**7)}
    with pytest.raises(DataError, match="compressed"):
        read_torch_file(zip_of(tmp_path / "x.pt", bomb, compression=zipfile.ZIP_DEFLATED))
    twice = {**good, "b/data.pkl": good["a/data.pkl"]}
    with pytest.raises(DataError, match="or several"):
        read_torch_file(zip_of(tmp_path / "x.pt", twice))
    big = {**good, "a/byteorder": b"big"}
    with pytest.raises(DataError, match="big-endian"):
        read_torch_file(zip_of(tmp_path / "x.pt", big))


def test_every_cut_is_one_error(tmp_path: Path) -> None:
    data = saved(tmp_path, {"a": torch.ones(10), "b": [1, 2]}).read_bytes()
    path = tmp_path / "cut.pt"
    for size in range(0, len(data) - 1, 7):
        path.write_bytes(data[:size])
        with pytest.raises(DataError):
            read_torch_file(path)


def test_every_flipped_byte_is_an_error_or_no_matter(tmp_path: Path) -> None:
    wanted = {"a": torch.arange(10.0), "b": [1, 2]}
    data = bytearray(saved(tmp_path, wanted).read_bytes())
    path, refused = tmp_path / "flipped.pt", 0
    for position in range(0, len(data), 3):
        data[position] ^= 0x55
        path.write_bytes(data)
        data[position] ^= 0x55
        try:
            found = read_torch_file(path)
            assert torch.equal(found["a"].read(), wanted["a"]) and found["b"] == [1, 2]
        except DataError:
            refused += 1
    assert refused > 50


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.ones(1000))
    found = read_torch_file(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match="cut short"):
        found.read()


def test_the_older_format_is_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": 1}, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "old.pt").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match=r"torch before 1\.6") as caught:
        read_torch_file(tmp_path / "old.pt")
    assert "save it again" in str(caught.value.problems[0].remedy)


def test_text_and_safetensors_are_no_checkpoints(tmp_path: Path) -> None:
    for content in (b"", b"PK", b"hello" * 100, b"\x80\x02}."):
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(DataError, match=r"no file of torch\.save"):
            read_torch_file(tmp_path / "x.pt")


def shared(kind: bytes, *, levels: int, width: int = 9) -> bytes:
    """The code of a value that holds the value before it several times, and so on; `kind` makes a
    list or a tuple of what is above the mark."""
    code = b"(" + b"N" * width + kind + b"q\x00"
    for _ in range(levels):
        code += b"0(" + b"h\x00" * width + kind + b"q\x00"
    return code


ENDLESS = {
    "shared tuples as a key": b"}" + shared(b"t", levels=40) + b"I1\ns.",
    "shared tuples": shared(b"t", levels=40) + b".",
    "shared lists": b"}X\x01\x00\x00\x00a" + shared(b"l", levels=40) + b"s.",
    "deep lists": b"(" * 100_000 + b"l" * 100_000 + b".",
    "deep tuples": b"N" + b"\x85" * 100_000 + b".",
    "deep objects' states": b"cargparse\nNamespace\n(t\x81" + b"(" * 500 + b"l" * 500 + b"b.",
    "an object as a key": b"}cmegatron\nIndex\n)\x81}X\x01\x00\x00\x00a"
    + shared(b"t", levels=40)
    + b"sbNs.",
    "a set of shared tuples": b"\x8f(" + shared(b"t", levels=40) + b"\x90.",
    "a bytearray of any size": b"\x96" + struct.pack("<Q", 2**40) + b"x.",
    "a list in itself": b"]q\x00h\x00a.",
    "a number without end": b"\x8b" + struct.pack("<i", 10_000) + b"\x01" * 10_000 + b".",
    "numbers of one hash as keys": b"}\x8a\x09" + (2**61 - 1 << 3).to_bytes(9, "little") + b"Ns.",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_structures_without_end_are_refused_at_once(name: str) -> None:
    with pytest.raises(DataError) as caught:
        read_pickle(ENDLESS[name], where="x")
    assert len(str(caught.value).splitlines()) == 1


def test_what_checkpoints_share_is_read() -> None:
    twice = [0.9, 0.95]
    value = {n: {"betas": twice, "more": (twice, twice)} for n in range(1000)}
    assert read_pickle(pickle.dumps(value, protocol=2), where="x") == value
    # An object may refer to itself by its attributes; nothing here follows them.
    found = read_pickle(b"cargparse\nNamespace\n(t\x81q\x00}X\x01\x00\x00\x00ah\x00sb.", where="x")
    assert isinstance(found, PickledObject) and found.fields["a"] is found


def test_an_instruction_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.foreign.pickled.MOST_INSTRUCTIONS", 1000)
    with pytest.raises(DataError, match="more instructions"):
        read_pickle(b"N0" * 1000 + b"N.", where="x")
