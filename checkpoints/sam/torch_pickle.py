"""The pickle inside a PyTorch file, read as data: nothing in it is imported or called.

A pickle is a program for a stack machine. Here its instructions are decoded by `pickletools` and
carried out by a machine that knows containers, numbers, strings, and the few names with which
`torch.save` writes tensors. Any other instruction or name is an error.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

STORAGES: Mapping[str, str] = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.ComplexFloatStorage": "C64",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
"""PyTorch's storage classes: their element types by the names of `files.DTYPES`."""


class PickleError(ValueError):
    """A pickle that is broken or asks for something else than tensors."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where elements lie: `key` is the record's name, `size` its elements."""

    dtype: str
    key: str
    size: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage; offset and strides in elements. Nothing has been checked yet."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


@dataclass(frozen=True, slots=True)
class _Name:
    """A global name that the pickle mentions; never resolved."""

    name: str


_MARK = object()


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    return StoredTensor(storage, offset, shape, strides)


def _parameter(data: Any, *_: Any) -> Any:
    return data


_CALLS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "collections.OrderedDict": dict,
}
"""The names that a pickle may call, and what is done instead."""


def read(pickle: bytes) -> Any:
    """The object in a pickle: containers, numbers, strings, and `StoredTensor` for tensors.

    Raises PickleError, which says what it asks for, if it holds anything else or is broken.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise PickleError(f"is broken ({type(error).__name__}: {error})") from error
    raise PickleError("is broken: it has no end")


class _Machine:
    """The stack, and the values that the pickle numbered to use them again."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        """The topmost value."""
        value = self.stack.pop()
        if value is _MARK:
            raise PickleError("is broken: a mark where a value should be")
        return value

    def pop_to_mark(self) -> list[Any]:
        """All values above the last mark."""
        values = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def top(self, kind: type) -> Any:
        """The topmost value, left where it is."""
        if not isinstance(self.stack[-1], kind):
            raise PickleError(f"changes a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def step(self, opcode: str, argument: Any) -> None:
        """Carry out one instruction."""
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.stack.append(_MARK)
            case "EMPTY_DICT":
                self.stack.append({})
            case "EMPTY_LIST":
                self.stack.append([])
            case "EMPTY_TUPLE":
                self.stack.append(())
            case "NONE":
                self.stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                self.stack.append(opcode == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                self.stack.append(argument)
            case "SHORT_BINUNICODE" | "BINUNICODE":
                self.stack.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "TUPLE":
                self.stack.append(tuple(self.pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                values = [self.pop() for _ in range(int(opcode[-1]))]
                self.stack.append(tuple(values[::-1]))
            case "APPEND":
                value = self.pop()
                self.top(list).append(value)
            case "APPENDS":
                values = self.pop_to_mark()
                self.top(list).extend(values)
            case "SETITEM":
                value, key = self.pop(), self.pop()
                self._set([key, value])
            case "SETITEMS":
                self._set(self.pop_to_mark())
            case "GLOBAL":
                self._mention(argument.replace(" ", "."))
            case "STACK_GLOBAL":
                name, module = self.pop(), self.pop()
                self._mention(f"{_text(module)}.{_text(name)}")
            case "BINPERSID":
                self.stack.append(_storage(self.pop()))
            case "REDUCE":
                arguments, function = self.pop(), self.pop()
                self.stack.append(_call(function, arguments))
            case "BUILD":
                # An OrderedDict's attributes: the versions of modules.
                self.pop()
                self.top(dict)
            case _:
                raise PickleError(f"uses the instruction {opcode}, which tensors do not need")

    def _mention(self, name: str) -> None:
        if name not in _CALLS and name not in STORAGES:
            raise PickleError(f"asks for {name}, which tensors do not need")
        self.stack.append(_Name(name))

    def _set(self, values: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int):
                raise PickleError(f"has a key that is a {type(key).__name__}")
            target[key] = value


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Name) or function.name not in _CALLS:
        what = function.name if isinstance(function, _Name) else f"a {type(function).__name__}"
        raise PickleError(f"calls {what}")
    if not isinstance(arguments, tuple):
        raise PickleError(f"calls {function.name} with a {type(arguments).__name__}")
    if function.name == "collections.OrderedDict" and arguments:
        raise PickleError("makes an OrderedDict of something else than items")
    return _CALLS[function.name](*arguments)


def _storage(identity: Any) -> Storage:
    """From a persistent identity: ("storage", class, record, device, elements)."""
    match identity:
        case ("storage", _Name(name), str(key), str(), int(size)) if name in STORAGES and size >= 0:
            return Storage(STORAGES[name], key, size)
    raise PickleError("refers to something outside it that is no storage")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise PickleError(f"has a name that is a {type(value).__name__}")
    return value
