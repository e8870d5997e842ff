"""Reads pickled data without unpickling it: nothing in a file is imported or called.

A pickle is a program for a small stack machine. Python's own machine imports what the program names
and calls it, which is how a checkpoint can run code. This one knows values only:

    numbers, text, None, tuples, lists, dictionaries, sets      as they are
    a name such as torch.float32 or argparse.Namespace          `PickledName`, which is two words
    an object: a name that was called, with its arguments       `PickledObject`, which is data
    a tensor                                                    what `TensorBuilders` makes of it

Names are checked against a list, and any other name is refused as soon as it is read, before
anything is done with it. What is on the list is not imported either: a `PickledObject` is a record
of what the file says. `pickletools` takes the bytes apart, and every failure is a `DataError`.

Few bytes can describe a structure of any depth, or one that holds the same part so often that a
walk through it never ends. Dictionary keys are plain values of a few parts, and what was read is
measured before anybody gets it: see `_require_bounded`.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NoReturn

from gristmill.base.errors import DataError

_CONTAINERS = {
    "collections.OrderedDict": dict,
    "collections.defaultdict": dict,
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.set": list,
    "builtins.frozenset": list,
    "torch.Size": tuple,
}
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
_PARAMETERS = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
)
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_KEYS = (str, bytes, int, float, type(None))
_MOST_KEY_PARTS = 64
_LARGEST_KEY = 2**60
"""Larger whole numbers can be chosen so that they all have the same hash."""
_LARGEST_NUMBER = 2**256
_MOST_COPIED = 10**7
MOST_INSTRUCTIONS = 5 * 10**7
"""Of one pickle: about a minute. The metadata of a distributed checkpoint has some thirty for each
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
    items: list[Any] = field(default_factory=list)

    @property
    def fields(self) -> dict[Any, Any]:
        """Its attributes."""
        return self.state if isinstance(self.state, dict) else {}


class PickledState(dict[Any, Any]):
    """A dictionary, which may have attributes that nobody reads."""


@dataclass(frozen=True)
class TensorBuilders:
    """What tensors become."""

    storage: Callable[[tuple[Any, ...]], Any]
    """From a persistent id."""
    tensor: Callable[[tuple[Any, ...]], Any]
    """From the arguments of torch's `_rebuild_tensor_v2`."""


def _refuse_storage(_: tuple[Any, ...]) -> NoReturn:
    raise ValueError("it has tensors, which have no place here")


NO_TENSORS = TensorBuilders(_refuse_storage, _refuse_storage)


class _StackMark:
    """Where a tuple or a list of items begins on the stack."""


_MARK = _StackMark()


def read_pickle(data: bytes, *, where: str, builders: TensorBuilders = NO_TENSORS) -> Any:
    """The value that a pickle describes."""
    return read_pickles(BytesIO(data), 1, where=where, builders=builders)[0]


def read_pickles(
    file: BytesIO, count: int, *, where: str, builders: TensorBuilders = NO_TENSORS
) -> list[Any]:
    """The values of pickles that follow each other."""
    try:
        return [_Machine(builders).run(file) for _ in range(count)]
    except DataError:
        raise
    except _RefusedNameError as error:
        raise DataError(
            f"this file names {error}, which no checkpoint needs; it was not run, and neither was "
            "anything else in the file",
            where=where,
            remedy="do not load this file with other programs: it may be made to harm",
        ) from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, EOFError) as error:
        raise DataError(f"damaged, or no checkpoint: {_said(error)}", where=where) from error
    except (struct.error, RecursionError, MemoryError, AttributeError) as error:
        raise DataError(f"damaged, or no checkpoint: {_said(error)}", where=where) from error


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


class _RefusedNameError(Exception):
    """A name that no checkpoint needs."""


class _Machine:
    """The stack machine of one pickle."""

    def __init__(self, builders: TensorBuilders) -> None:
        self._hooks = builders
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0

    def run(self, file: BytesIO) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            name = opcode.name
            if name == "STOP":
                break
            if count > MOST_INSTRUCTIONS:
                raise ValueError("it has more instructions than any checkpoint")
            if name in _LITERALS:
                if type(argument) is int and abs(argument) >= _LARGEST_NUMBER:
                    raise ValueError("a number has more digits than any of a checkpoint")
                self._stack.append(argument)
            else:
                action = _ACTIONS.get(name)
                if action is None:
                    raise ValueError(f"the instruction {name} has no place in a checkpoint")
                action(self, argument)
        value = self._pop()
        if self._stack:
            raise ValueError("values are left over")
        _require_bounded(value)
        return value

    # -------------------------------------------------------------- stack and memo

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise ValueError("a value is missing")
        return self._stack[-1]

    def _items(self) -> list[Any]:
        """All values above the last mark, which are taken away with it."""
        for position in range(len(self._stack) - 1, -1, -1):
            if self._stack[position] is _MARK:
                items = self._stack[position + 1 :]
                del self._stack[position:]
                return items
        raise ValueError("a mark is missing")

    def put(self, argument: Any) -> None:
        self._memo[int(argument)] = self._top()

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._top()

    def get(self, argument: Any) -> None:
        self._stack.append(self._memo[int(argument)])

    def mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def drop(self, _: Any) -> None:
        self._stack.pop()

    def drop_items(self, _: Any) -> None:
        self._items()

    def repeat(self, _: Any) -> None:
        self._stack.append(self._top())

    def nothing(self, _: Any) -> None:
        """Frames and the protocol's number say nothing about values."""

    # -------------------------------------------------------------- containers

    def empty_list(self, _: Any) -> None:
        self._stack.append([])

    def empty_dict(self, _: Any) -> None:
        self._stack.append(PickledState())

    def make_list(self, _: Any) -> None:
        self._stack.append(self._items())

    def make_dict(self, _: Any) -> None:
        items, made = self._items(), PickledState()
        _set_items(made, items)
        self._stack.append(made)

    def make_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._items()))

    def short_tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def append(self, _: Any) -> None:
        value = self._pop()
        _extend(self._top(), [value])

    def appends(self, _: Any) -> None:
        items = self._items()
        _extend(self._top(), items)

    def set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        _set_items(self._top(), [key, value])

    def set_items(self, _: Any) -> None:
        items = self._items()
        _set_items(self._top(), items)

    # -------------------------------------------------------------- names and objects

    def name(self, argument: Any) -> None:
        self._stack.append(_checked_name(*argument.split(" ", 1)))

    def stack_name(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a name is no text")
        self._stack.append(_checked_name(module, name))

    def reduce(self, _: Any) -> None:
        arguments, called = self._pop(), self._pop()
        self._stack.append(self._made(called, arguments))

    def new_object_with_keywords(self, _: Any) -> None:
        keywords, arguments, called = self._pop(), self._pop(), self._pop()
        made = self._made(called, arguments)
        if isinstance(made, PickledObject) and isinstance(keywords, dict):
            made.state = keywords
        self._stack.append(made)

    def object_from_items(self, _: Any) -> None:
        called, *arguments = self._items()
        self._stack.append(self._made(called, tuple(arguments)))

    def instance(self, argument: Any) -> None:
        called = _checked_name(*argument.split(" ", 1))
        self._stack.append(self._made(called, tuple(self._items())))

    def build(self, _: Any) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, PickledObject):
            target.state = state
        elif not isinstance(target, PickledState):
            raise ValueError("a value that is no object gets attributes")

    def persistent(self, _: Any) -> None:
        known = self._pop()
        if not isinstance(known, tuple):
            raise ValueError("a reference to a storage is no tuple")
        self._stack.append(self._hooks.storage(known))

    def _made(self, called: Any, arguments: Any) -> Any:
        if not isinstance(called, PickledName) or not isinstance(arguments, tuple):
            raise ValueError("something other than a name is called")
        name = called.name
        if name in _TENSORS:
            return self._hooks.tensor(arguments)
        if name in _PARAMETERS:
            return arguments[0]
        if name == "_codecs.encode":
            if not isinstance(arguments[0], str):
                raise ValueError("something other than text is encoded")
            self._count_copies(len(arguments[0]))
            return arguments[0].encode("latin-1")
        if name == "copyreg._reconstructor" and isinstance(arguments[0], PickledName):
            return self._made(arguments[0], ())
        kind = _CONTAINERS.get(name)
        if kind is None:
            return PickledObject(name, arguments)
        first = arguments[0] if arguments else ()
        if name.endswith("defaultdict"):
            first = ()
        if kind is not dict:
            if not isinstance(first, list | tuple):
                raise ValueError(f"{name} of something other than a list")
            self._count_copies(len(first))
            return kind(first)
        made = PickledState()
        pairs = first if isinstance(first, list | tuple) else list(first.items())
        self._count_copies(len(pairs))
        for key, value in pairs:
            _set_items(made, [key, value])
        return made

    def _count_copies(self, count: int) -> None:
        """A few bytes may ask for a copy of all that there is, again and again."""
        self._copied += count
        if self._copied > _MOST_COPIED:
            raise ValueError("it copies more values than any checkpoint has")


def _checked_name(module: str, name: str) -> PickledName:
    full = f"{_OLD_MODULES.get(module, module)}.{name}"
    known = full in _CONTAINERS or full in _TENSORS or full in _PARAMETERS
    if not known and not _INERT.fullmatch(full):
        raise _RefusedNameError(full if len(full) < 100 else f"{full[:100]}…")
    return PickledName(full)


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, PickledObject):
        target.items += items
    elif isinstance(target, list):
        target += items
    else:
        raise ValueError("items are added to something that is no list")


def _set_items(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    pairs = list(zip(items[::2], items[1::2], strict=True))
    if isinstance(target, PickledObject):
        target.items += pairs
        return
    if not isinstance(target, PickledState):
        raise ValueError("items are set in something that is no dictionary")
    for key, value in pairs:
        if not _plain(key):
            raise ValueError("a key of a dictionary is no plain value")
        target[key] = value


def _plain(key: Any) -> bool:
    """Whether a key can be hashed and compared without surprises."""
    waiting, parts = [key], 0
    while waiting:
        one, parts = waiting.pop(), parts + 1
        if isinstance(one, tuple):
            if parts + len(waiting) + len(one) > _MOST_KEY_PARTS:
                return False
            waiting += one
        elif isinstance(one, int):
            if abs(one) >= _LARGEST_KEY:
                return False
        elif not isinstance(one, (*_KEYS, PickledName, PickledObject)):
            return False
    return True


def _require_bounded(value: Any) -> None:
    """Refuse a value through which no walk, comparison or `repr` would come to an end soon. Objects
    are opaque to all of these, so each is measured by itself."""
    sizes: dict[int, tuple[int, int]] = {}
    """The size of every container, with shared values counted again, and its depth."""
    roots, known, path = [value], {id(value)}, set[int]()
    while roots:
        waiting = [roots.pop()]
        while waiting:
            one = waiting[-1]
            parts = _parts(one)
            if id(one) in sizes:
                waiting.pop()
            elif id(one) in path:
                inner = [sizes.get(id(part), (1, 0)) for part in parts]
                size = 1 + sum(count for count, _ in inner)
                depth = 1 + max((depth for _, depth in inner), default=0)
                if size > _MOST_VALUES or depth > _DEEPEST:
                    raise ValueError("its lists or dictionaries have no end")
                sizes[id(one)] = (1, 0) if isinstance(one, PickledObject) else (size, depth)
                path.remove(id(one))
            else:
                path.add(id(one))
                for part in parts:
                    if isinstance(part, PickledObject):
                        roots += [] if id(part) in known else [part]
                        known.add(id(part))
                    elif id(part) in path:
                        raise ValueError("a list or dictionary holds itself")
                    elif isinstance(part, dict | list | tuple):
                        waiting.append(part)


def _parts(value: Any) -> Collection[Any]:
    """The values in a container or an object."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, PickledObject):
        return (value.arguments, value.state, value.items)
    return value if isinstance(value, list | tuple) else ()


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine._stack.append(value)


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.short_tuple(count)


_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8".split()
)
_ACTIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": _Machine.empty_list,
    "EMPTY_SET": _Machine.empty_list,
    "EMPTY_DICT": _Machine.empty_dict,
    "LIST": _Machine.make_list,
    "DICT": _Machine.make_dict,
    "TUPLE": _Machine.make_tuple,
    "FROZENSET": _Machine.make_list,
    **{f"TUPLE{count}": _tuple_of(count) for count in (1, 2, 3)},
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "ADDITEMS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "MARK": _Machine.mark,
    "POP": _Machine.drop,
    "POP_MARK": _Machine.drop_items,
    "DUP": _Machine.repeat,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("PROTO", "FRAME"), _Machine.nothing),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_name,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.reduce),
    "NEWOBJ_EX": _Machine.new_object_with_keywords,
    "OBJ": _Machine.object_from_items,
    "INST": _Machine.instance,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}
