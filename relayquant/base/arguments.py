"""Check arguments of public functions against their annotations. A wrong type raises an error that
says what is allowed, before any work is done.

`check_arguments` decorates functions and methods, `check_fields` dataclasses. Readers and type
checkers see the same annotations, so documentation and checks cannot differ.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import numbers
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

import numpy as np

from relayquant.errors import (
    ConfigError,
    ModelError,
    RelayQuantError,
    find_near_name,
    format_count,
    suggest_name,
)

P = ParamSpec("P")
R = TypeVar("R")
ClassT = TypeVar("ClassT", bound=type)
#: tests whether a value is of a type
Test = Callable[[Any], bool]

#: names of the model classes (this module imports none of them)
MODELS = ("IRModule", "PreparedModel")
#: PyTorch's class of modules, as text
TORCH = "'torch.nn.modules.module.Module'"
#: a function for Relax modules -> the one that does the same for a module of PyTorch
TORCH_CALLS = {
    "compare": "compare(module, qmod, dataset)",
    "quantize": "quantize(module, example_inputs, dataset)",
    "prepare": "prepare(module, example_inputs)",
    "finetune": "prepare_qat(module, example_inputs), and a training loop of your own",
}


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` to raise before it starts if an argument does not match its annotation.

    Raises:
        ModelError: the annotation is a module or a prepared model.
        ConfigError: any other annotation does not match.
        TypeError: an argument has an unknown name, or one is missing.
    """
    signature = inspect.signature(function)
    *_, owner, called = ("", *function.__qualname__.split("."))
    called = owner if called == "__init__" else called  # a class is called by its name

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = find_hints(function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            for name, value in zip(signature.parameters, args, strict=False):
                if is_torch_module(value) and name in hints:  # its own function takes fewer
                    check_type(value, hints[name], f"{called}: {name}")
            raise TypeError(describe_call(called, signature, kwargs, error)) from None
        for name, value in bound.arguments.items():
            if name not in hints:
                continue
            kind, where = signature.parameters[name].kind, f"{called}: {name}"
            if kind is inspect.Parameter.VAR_KEYWORD:
                continue
            if kind is inspect.Parameter.VAR_POSITIONAL:
                for one in value:
                    check_type(one, hints[name], where)
                continue
            bound.arguments[name] = value = read_text(value, hints[name], where)
            check_type(value, hints[name], where)
        return function(*bound.args, **bound.kwargs)

    return checked


def describe_call(
    called: str, signature: inspect.Signature, given: Mapping[str, Any], error: TypeError
) -> str:
    """Describe why arguments do not fit a function: Python's message and the nearest known argument
    name.
    """
    text = f"{called}() {error}"
    unknown = next((name for name in given if name not in signature.parameters), None)
    known = [name for name in signature.parameters if name != "self"]
    return f"{text}. {suggest_name(unknown, known)}" if unknown else text


def check_fields(kind: ClassT) -> ClassT:
    """Decorate a dataclass so that its constructor raises ConfigError for a field that does not
    match its annotation. Errors of the class's own `__post_init__` pass through.
    """
    init = kind.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and all(field.kw_only for field in fields(kind)):
            names = ", ".join(f"{field.name}=..." for field in fields(kind))
            raise ConfigError(f"{kind.__name__} takes its settings by name: {names}.", code="RQ101")
        taken = dict(zip(list_names(), args, strict=False)) | kwargs
        for name, hint in find_choices():
            if name in taken:
                taken[name] = read_text(taken[name], hint, f"{kind.__name__}.{name}")
        if len(args) <= len(list_names()):
            args, kwargs = (), taken
        try:
            init(self, *args, **kwargs)
        except RelayQuantError:
            raise
        except Exception:
            # With a field of a wrong type, `__post_init__` may raise anything.
            check_each(self)
            raise
        check_each(self)

    @functools.cache
    def find_tests() -> Sequence[tuple[str, Any, Test]]:
        hints = find_hints(kind)
        return [(f.name, hints[f.name], find_test(hints[f.name])) for f in fields(kind)]

    @functools.cache
    def list_names() -> list[str]:
        return [f.name for f in fields(kind) if f.init and not f.kw_only]

    @functools.cache
    def find_choices() -> list[tuple[str, Any]]:
        hints = find_hints(kind)
        return [
            (f.name, hints[f.name]) for f in fields(kind) if f.init and find_enums(hints[f.name])
        ]

    def check_each(self: Any) -> None:
        for name, hint, test in find_tests():
            if hasattr(self, name) and not test(getattr(self, name)):
                check_type(getattr(self, name), hint, f"{kind.__name__}.{name}")

    kind.__init__ = checked
    return kind


@functools.cache
def find_hints(of: Any) -> Mapping[str, Any]:
    """Evaluate the annotations of a function or class. Called at the first use, when all modules
    are loaded.
    """
    return typing.get_type_hints(of)


def check_type(value: object, hint: Any, where: str) -> None:
    """Raise ConfigError (ModelError where a model is wanted) if `value` is not of type `hint`.

    Elements of tuples, lists and dicts are checked. Elements of iterators are not, because an
    iterator can be read only once.
    """
    if find_test(hint)(value):
        return
    allowed = describe_type(hint)
    raised = ModelError if any(name in allowed for name in MODELS) else ConfigError
    shown = f"the class {value.__name__}" if isinstance(value, type) else describe_value(value)
    remedy = ""
    if "IRModule" in allowed and isinstance(value, str | os.PathLike):
        remedy = " Read a file with relayquant.load."
    elif "IRModule" in allowed and is_torch_module(value):
        remedy = " For a torch.nn.Module, use relayquant.torch.quantize, compare or export."
        called = where.partition(":")[0]
        if type(value).__name__ == "IntegerModule":  # of `relayquant.torch.as_module`
            remedy = " Pass its attribute mod, which is the integer module."
        elif called in TORCH_CALLS:
            remedy = f" For a torch.nn.Module: relayquant.torch.{TORCH_CALLS[called]}."
    elif "QConfigMapping" in allowed and type(value).__module__.startswith("torch.ao"):
        takers = "relayquant.torch.quantize, prepare and prepare_qat"
        remedy = f" A mapping of torch.ao: {takers} take it."
    elif where.endswith(": example_inputs"):
        remedy = " For one input x: (x,)."
    raise raised(f"{where} is {shown}; allowed: {allowed}.{remedy}", code="RQ101")


def is_torch_module(value: object) -> bool:
    """Return whether a value is a torch.nn.Module. Does not import PyTorch."""
    return any(TORCH in str(base) for base in inspect.getmro(type(value)))


def read_text(value: Any, hint: Any, where: str) -> Any:
    """Return the member of an enum that a text names, if the annotation has an enum. Texts in a
    list or tuple are converted too. Any other value is unchanged.

    Raises:
        ConfigError: no member has this name. In an annotation with an enum and `str`, `str` is for
            type checkers: it stands for the text of a member.
    """
    kinds = find_enums(hint)
    if kinds and isinstance(value, list | tuple):
        return type(value)([read_text(one, hint, where) for one in value])
    if not kinds or not isinstance(value, str):
        return value
    known = {member.value: member for kind in kinds for member in kind}
    if value in known:
        return known[value]
    near = find_near_name(value, known)
    meant = f" Did you mean {near!r}?" if near else ""
    allowed = ", ".join(map(repr, known))
    raise ConfigError(f"{where} is {value!r}; allowed: {allowed}.{meant}", code="RQ101")


@functools.cache
def find_enums(hint: Any) -> tuple[type[enum.Enum], ...]:
    """Return the enums whose members an annotation allows: directly, in a union, or as elements of
    a list or tuple.
    """
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return (hint,)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(kind for one in args for kind in find_enums(one))
    if origin in (list, collections.abc.Sequence) or (origin is tuple and args[1:] == (...,)):
        return find_enums(args[0]) if isinstance(args[0], type) else ()
    return ()


def takes_arguments(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with `count` positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        pass  # a built-in without a signature: the call itself will show it
    return True


def describe_value(value: object) -> str:
    """Describe a value for a message: its short text, or its type if it has no text."""
    if type(value).__repr__ is object.__repr__ or callable(value):
        return f"a {type(value).__name__}"
    return reprlib.repr(value)


@functools.cache
def find_test(hint: Any) -> Test:
    """Return a test for values of an annotated type. Each annotation is analyzed once."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object or isinstance(hint, TypeVar):
        return lambda value: True
    if hint is None or hint is type(None):
        return lambda value: value is None
    if origin in (typing.Union, types.UnionType):
        # One `isinstance` call covers all classes.
        plain = tuple(one for one in args if isinstance(one, type) and is_plain(one))
        tests = [find_test(one) for one in args if one not in plain]
        return lambda value: isinstance(value, plain) or any(test(value) for test in tests)
    if origin is collections.abc.Callable or hint is collections.abc.Callable:
        return callable
    if origin is not None:
        holds = find_element_test(origin, args)
        return lambda value: isinstance(value, origin) and holds(value)
    if hint is bool:
        return lambda value: isinstance(value, bool | np.bool_)
    if not is_plain(hint):
        kind = numbers.Integral if hint is int else numbers.Real
        return lambda value: isinstance(value, kind) and not isinstance(value, bool | np.bool_)
    return lambda value: isinstance(value, hint)


def is_plain(kind: object) -> bool:
    """Return whether an annotation with this class allows all its instances and nothing else."""
    return kind not in (bool, int, float, object, Any) and not typing.get_origin(kind)


def find_element_test(origin: type, args: tuple[Any, ...]) -> Test:
    """Return a test for the elements of a collection. A single text is not a collection of
    names.
    """
    if issubclass(origin, Mapping):
        key, item = map(find_test, args or (Any, Any))
        # Values of any type are not read: a mapping may load them.
        takes_all = args[1:] in ((), (Any,))
        return lambda value: all(map(key, value)) and (takes_all or all(map(item, value.values())))
    if not args:
        return lambda value: not isinstance(value, str | bytes)
    if origin is tuple and args[-1] is not ...:
        tests = tuple(map(find_test, args))
        return lambda value: (
            len(value) == len(tests) and all(test(v) for test, v in zip(tests, value, strict=True))
        )
    test = find_test(args[0])

    def holds(value: Any) -> bool:
        if isinstance(value, tuple | list | set | frozenset | Mapping):
            return all(map(test, value))
        return not isinstance(value, str | bytes)

    return holds


#: names of types in messages
WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "text"}
NAMES = {
    "IRModule": "a tvm.IRModule",
    "QuantPattern": "an operator row (relayquant.extend.QuantOp)",
    "AnyAffineRule": "an AffineRule",
    "Matcher": "a pattern with a method match(graph, var)",
}


def describe_type(hint: Any) -> str:
    """Describe what an annotation allows: "a QConfigMapping, or None"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if hint in WORDS:
        return WORDS[hint]
    if origin in (typing.Union, types.UnionType):
        words = list(dict.fromkeys(describe_type(one) for one in args))
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, or {words[-1]}"
    if origin is collections.abc.Callable or hint is collections.abc.Callable:
        return "a function"
    if origin is os.PathLike or hint is os.PathLike:
        return "a path"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a dict {{{', '.join(map(describe_type, args[:1]))}: " + (
            f"{describe_type(args[1])}}}" if len(args) > 1 else "...}"
        )
    if origin is tuple and ... not in args:
        return f"a tuple ({', '.join(map(describe_type, args))})"
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        items = describe_type(args[0]) if args else "values"
        return f"a list or tuple of {re.sub('^an? ', '', items)}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"a member of {hint.__name__} ({', '.join(member.name for member in hint)})"
    if hint is Any or hint is object:
        return "a value"
    name = getattr(origin or hint, "__name__", str(hint)).lstrip("_")
    if name in NAMES:
        return NAMES[name]
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def describe_not_finite(array: np.ndarray) -> str:
    """Describe elements that are not finite: "3 NaN and 0 infinite of 12 elements".

    Returns:
        "" if all elements are finite.
    """
    low, high = array.min(initial=0), array.max(initial=0)  # NaN passes through both
    if np.isfinite(low) and np.isfinite(high):
        return ""
    nan, infinite = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    return f"{nan} NaN and {infinite} infinite of {format_count(array.size, 'element')}"
