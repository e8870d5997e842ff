"""Reads pickled data without unpickling it: nothing in a file is imported or called.

A pickle is a program for a small stack machine. Python's own machine imports what the program names
and calls it, which is how a checkpoint can run code. This one knows values only:

    numbers, text, None, tuples, lists, dictionaries            as they are
    sets                                                        lists
    a name such as torch.float32 or argparse.Namespace          `PickledName`, which is two words
    an object: a name that was called, with its arguments       `PickledObject`, which is data
    a tensor                                                    what the caller makes of it

Names are checked against a list, and any other name is refused as soon as it is read, before
anything is done with it. What is on the list is not imported either: a `PickledObject` is a record
of what the file says. `pickletools` takes the bytes apart, and every failure is a `DataError`.

Few bytes can describe a structure of any depth, or one that holds the same part so often that a
walk through it never ends. Dictionary keys are plain values of a few parts, and what was read is
measured before anybody gets it: see `_require_bounded`.

`torch.load(weights_only=True)` cannot keep this promise (tried with torch 2.13). It hashes a key of
tuples within tuples for ever, or until the process dies. Its own list of names has `bytearray` and
storages of any size. And it does not read pickles of protocol 4, such as the `.metadata` of torch's
distributed checkpoints.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from gristmill.base.errors import DataError

_DICTIONARIES = ("collections.OrderedDict", "collections.defaultdict", "builtins.dict")
_SEQUENCES = {
    "builtins.list": list,
    "builtins.set": list,
    "builtins.frozenset": list,
    "torch.Size": tuple,
}
_PARAMETERS = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
)
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_BUILT = {*_DICTIONARIES, *_SEQUENCES, *_PARAMETERS, *_TENSORS}
_INERT = re.compile(
    r"(megatron|transformer_engine|deepspeed|apex)(\.\w+)*"
    r"|argparse\.Namespace|types\.SimpleNamespace|copy_?reg\._reconstructor|builtins\.object"
    r"|torch\.(device|layout|memory_format|\w+Storage|storage\.\w+Storage)"
    r"|torch\.(strided|contiguous_format|preserve_format|channels_last)"
    r"|torch\.(u?int|float|bfloat|complex)\w+|torch\.(bool|half|double|long|int|short)"
    r"|torch\.serialization\._get_layout|torch\._utils\._rebuild_device_tensor_from_numpy"
    r"|torch\.distributed\.checkpoint\.(metadata|filesystem|planner|_extension)\.\w+"
    r"|numpy\.(ndarray|dtype)|numpy\.(core|_core)\.multiarray\.(_reconstruct|scalar)"
    r"|_codecs\.encode|io\.BytesIO|pathlib\.(Pure)?(Posix|Windows)?Path"
    r"|signal\.Signals|datetime\.(datetime|timedelta|date|timezone)|builtins\.(complex|slice|range)"
)
"""Names that checkpoints of the programs we read have, besides containers and tensors."""
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_MOST_KEY_PARTS = 64
_LARGEST_KEY = 2**60
"""Larger whole numbers can be chosen so that they all have the same hash."""
_LARGEST_NUMBER = 2**256
_MOST_COPIED = 10**7
MOST_INSTRUCTIONS = 5 * 10**7
"""So many take about a minute. The metadata of a distributed checkpoint has some thirty for each
piece of a tensor."""
_DEEPEST = 100
_MOST_VALUES = 10**7
LARGEST = 2**29
"""Bytes of a pickle; tensors are elsewhere, and what remains is small."""


@dataclass(frozen=True)
class PickledName:
    """The name of a class or function in a file."""

    name: str


@dataclass(eq=False, repr=False)
class PickledObject:
    """What a file says about an object that is neither a container nor a tensor."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    @property
    def fields(self) -> dict[Any, Any]:
        """Its attributes."""
        return self.state if isinstance(self.state, dict) else {}


def _refuse_tensor(_: tuple[Any, ...]) -> NoReturn:
    raise ValueError("it has tensors, which have no place here")


def read_pickle(
    data: bytes,
    *,
    where: str,
    storage: Callable[[tuple[Any, ...]], Any] = _refuse_tensor,
    tensor: Callable[[tuple[Any, ...]], Any] = _refuse_tensor,
) -> Any:
    """The value that a pickle describes; `storage` makes one from its persistent id, and `tensor`
    one from the arguments of torch's `_rebuild_tensor_v2`."""
    try:
        return _Machine(storage, tensor).run(data)
    except _RefusedNameError as error:
        raise DataError(
            f"this file names {error}, which no checkpoint needs; it was not run, and neither was "
            "anything else in the file",
            where=where,
            remedy="do not load this file with other programs: it may be made to harm",
        ) from error
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, EOFError) as error:
        raise _damaged(error, where) from error
    except (struct.error, RecursionError, MemoryError) as error:
        raise _damaged(error, where) from error


def _damaged(error: BaseException, where: str) -> DataError:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 200 else f"{text[:200]}…"
    return DataError(f"damaged, or no checkpoint: {text}", where=where)


class _RefusedNameError(Exception):
    """A name that no checkpoint needs."""


class _Machine:
    """The stack machine of one pickle."""

    def __init__(self, storage: Callable[..., Any], tensor: Callable[..., Any]) -> None:
        self._storage, self._tensor = storage, tensor
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        """The stacks below each mark; a tuple or a list of items begins there."""
        self._memo: dict[int, Any] = {}
        self._copied = 0

    def run(self, data: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count > MOST_INSTRUCTIONS:
                raise ValueError("it has more instructions than any checkpoint")
            if opcode.name != "STOP":
                self._step(opcode.name, argument)
        value = self._stack.pop()
        if self._stack or self._outer:
            raise ValueError("values are left over")
        _require_bounded(value)
        return value

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case _ if name in _LITERALS:
                stack.append(argument)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[int(argument)] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self._memo[int(argument)])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "MARK":
                self._outer.append(stack)
                self._stack = []
            case "TUPLE":
                items = self._items()
                self._stack.append(tuple(items))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                values = [stack.pop() for _ in range(int(name[-1]))]
                stack.append(tuple(reversed(values)))
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "LIST" | "FROZENSET":
                items = self._items()
                self._stack.append(items)
            case "APPEND":
                value = stack.pop()
                _extend(stack[-1], [value])
            case "APPENDS" | "ADDITEMS":
                items = self._items()
                _extend(self._stack[-1], items)
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                items = self._items()
                self._stack.append({})
                _set_items(self._stack[-1], items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_items(stack[-1], [key, value])
            case "SETITEMS":
                items = self._items()
                _set_items(self._stack[-1], items)
            case "POP" if stack:
                stack.pop()
            case "POP" | "POP_MARK":
                self._items()
            case "DUP":
                stack.append(stack[-1])
            case "PROTO" | "FRAME":
                pass
            case "GLOBAL":
                stack.append(_checked_name(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_checked_name(module, name))
            case "REDUCE" | "NEWOBJ":
                arguments, called = stack.pop(), stack.pop()
                stack.append(self._called(called, arguments))
            case "NEWOBJ_EX":
                _, arguments, called = stack.pop(), stack.pop(), stack.pop()
                stack.append(self._called(called, arguments))
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], PickledObject):
                    stack[-1].state = state
                elif not isinstance(stack[-1], dict):
                    # Nobody reads the attributes of a dictionary, such as those of a state_dict.
                    raise ValueError("a value that is no object gets attributes")
            case "BINPERSID":
                persistent_id = stack.pop()
                if not isinstance(persistent_id, tuple):
                    raise ValueError("a reference to a storage is no tuple")
                stack.append(self._storage(persistent_id))
            case _:
                raise ValueError(f"the instruction {name} has no place in a checkpoint")

    def _items(self) -> list[Any]:
        """All values above the last mark, which are taken away with it."""
        items = self._stack
        if not self._outer:
            raise ValueError("a mark is missing")
        self._stack = self._outer.pop()
        return items

    def _called(self, called: Any, arguments: Any) -> Any:
        """The value that a call stands for."""
        if not isinstance(called, PickledName) or not isinstance(arguments, tuple):
            raise ValueError("something other than a name is called")
        name = called.name
        if name in _TENSORS:
            return self._tensor(arguments)
        if name in _PARAMETERS:
            return arguments[0]
        if name == "_codecs.encode":
            if not isinstance(arguments[0], str):
                raise ValueError("something other than text is encoded")
            self._count_copies(len(arguments[0]))
            return arguments[0].encode("latin-1")
        if name == "copyreg._reconstructor" and isinstance(arguments[0], PickledName):
            return self._called(arguments[0], ())
        if name not in _DICTIONARIES and name not in _SEQUENCES:
            return PickledObject(name, arguments)
        # The argument of a defaultdict is what makes its values.
        values = arguments[0] if arguments and not name.endswith("defaultdict") else ()
        if isinstance(values, dict) and name in _DICTIONARIES:
            values = list(values.items())
        if not isinstance(values, list | tuple):
            raise ValueError(f"{name} of something other than a list")
        self._count_copies(len(values))
        if name in _SEQUENCES:
            return _SEQUENCES[name](values)
        dictionary: dict[Any, Any] = {}
        for key, value in values:
            _set_items(dictionary, [key, value])
        return dictionary

    def _count_copies(self, count: int) -> None:
        """A few bytes may ask for a copy of all that there is, again and again."""
        self._copied += count
        if self._copied > _MOST_COPIED:
            raise ValueError("it copies more values than any checkpoint has")


_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8".split()
)


def _checked_name(module: Any, name: Any) -> PickledName:
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("a name is no text")
    full = f"{_OLD_MODULES.get(module, module)}.{name}"
    if full not in _BUILT and not _INERT.fullmatch(full):
        raise _RefusedNameError(full if len(full) < 100 else f"{full[:100]}…")
    return PickledName(full)


def _extend(target: Any, items: list[Any]) -> None:
    # Nobody reads the items of an object that is also a list.
    if isinstance(target, list):
        target += items
    elif not isinstance(target, PickledObject):
        raise ValueError("items are added to something that is no list")


def _set_items(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    if isinstance(target, PickledObject):
        return
    if not isinstance(target, dict):
        raise ValueError("items are set in something that is no dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not _is_plain(key):
            raise ValueError("a key of a dictionary is no plain value")
        target[key] = value


def _is_plain(key: Any) -> bool:
    """Whether a key can be hashed and compared without surprises."""
    waiting, parts = [key], 0
    while waiting:
        part, parts = waiting.pop(), parts + 1
        if isinstance(part, tuple):
            if parts + len(waiting) + len(part) > _MOST_KEY_PARTS:
                return False
            waiting += part
        elif isinstance(part, int):
            if abs(part) >= _LARGEST_KEY:
                return False
        elif not isinstance(part, str | bytes | float | None | PickledName | PickledObject):
            return False
    return True


def _require_bounded(value: Any) -> None:
    """Refuse a value through which no walk, comparison or `repr` would come to an end soon. Objects
    are opaque to all of these, so each is measured by itself."""
    sizes: dict[int, tuple[int, int] | None] = {}
    """The size of every container, with shared values counted again, and its depth; None while it
    is measured."""
    objects: list[PickledObject] = []
    known: set[int] = set()

    def measure(value: Any, outside: int) -> tuple[int, int]:
        if isinstance(value, PickledObject) and id(value) not in known:
            known.add(id(value))
            objects.append(value)
        if isinstance(value, int) and abs(value) >= _LARGEST_NUMBER:
            raise ValueError("a number has more digits than any of a checkpoint")
        if not isinstance(value, dict | list | tuple):
            return 1, 0
        if id(value) not in sizes:
            if outside > _DEEPEST:
                raise ValueError("its lists or dictionaries have no end")
            sizes[id(value)] = None
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            inner = [measure(part, outside + 1) for part in parts]
            size = 1 + sum(count for count, _ in inner)
            depth = 1 + max((depth for _, depth in inner), default=0)
            if size > _MOST_VALUES or depth > _DEEPEST:
                raise ValueError("its lists or dictionaries have no end")
            sizes[id(value)] = size, depth
        measured = sizes[id(value)]
        if measured is None:
            raise ValueError("a list or dictionary holds itself")
        return measured

    measure(value, 0)
    while objects:
        pickled = objects.pop()
        measure(pickled.arguments, 0)
        measure(pickled.state, 0)
