"""Relay reader, last step: `relay.syntax` -> a Relax module, operator by operator.

Function calls are inlined and branches on constants are taken, so main is one block. Relax infers
the types, and they are compared with the declared types.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax

from relayquant.errors import ModelError, RelayQuantError, format_count, suggest_name
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.function import SOURCES_ATTR
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape
from relayquant.relay import syntax
from relayquant.relay.attributes import complete_attrs
from relayquant.relay.operators import OPERATORS
from relayquant.relay.operators.base import RelayEmitter, Site, Value, make_const
from relayquant.relay.release import WrittenBy

#: Deepest nesting of expressions and of inlined functions. Relay's printer does not nest at all.
MAX_DEPTH = 100

#: Largest number of operators after inlining.
MAX_VALUES = 50_000

#: Values that need no name.
_LEAVES = (relax.Var, tvm.ir.GenericConst)

Params: TypeAlias = Mapping[str, Any]
Shapes: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class _Closure:
    """A function as a value, with the names it can see."""

    function: syntax.Function
    scope: MutableMapping[str, Any]


def build_module(
    module: syntax.Module,
    params: Params | None = None,
    shapes: Shapes | None = None,
    release: WrittenBy | None = None,
) -> tvm.IRModule:
    """Build the Relax module of a Relay module. main is one dataflow block.

    Args:
        params: Values of parameters of main, which become constants.
        shapes: Parameter name -> shape, for dimensions that the source leaves open (`?`).
        release: TVM release that wrote it. None if unknown.

    Raises:
        ModelError: operators are not supported (all are listed), names or types are wrong.
    """
    main = module.functions.get("main")
    if main is None:
        raise ModelError(
            f"The Relay module has no function @main, only: {', '.join(module.functions)}.",
            code="RQ204",
        )
    check_operators(module)
    names = [param.name for param in list_parameters(main)]
    given = match_names("params", params or {}, names)
    fixed = match_names("shapes", shapes or {}, names)
    return _ModuleBuilder(module, given, fixed, release).build(main)


def list_parameters(main: syntax.Function) -> list[syntax.Param]:
    """List the parameters of main, and the inputs that no function declares."""
    free = [s.param for s in main.body.statements if isinstance(s, syntax.FreeVar)]
    return [*main.params, *free]


def match_names(what: str, given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Map `given` to the parameter names of this module.

    TVM's printer puts a "v" before names that do not begin with a letter. A params file keeps the
    original names: "1x" is %v1x.

    Raises:
        ModelError: a name is not a parameter.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        printed = name if name in names or name[:1].isalpha() else f"v{name}"
        if printed not in names or (printed != name and printed in given):
            raise ModelError(
                f"{what} has {name!r}, which is not a parameter of @main. "
                f"{suggest_name(name, names)}",
                code="RQ103",
            )
        found[printed] = value
    return found


def check_operators(module: syntax.Module) -> None:
    """Raise one error that lists all operators without a row in the table.

    Checks the functions that main reaches.

    Raises:
        ModelError: there are such operators, or expressions are nested too deeply.
    """
    unknown: dict[str, list[str]] = {}
    for expr in _reachable(module):
        if isinstance(expr, syntax.OpCall) and expr.op not in OPERATORS:
            unknown.setdefault(expr.op or "(no name)", []).append(str(expr.where))
    if unknown:
        rows = [
            f"{name}: {', '.join(places[:8])}{', ...' if len(places) > 8 else ''}"
            for name, places in sorted(unknown.items())
        ]
        raise ModelError(
            f"Not supported, {format_count(len(rows), 'operator')} of the Relay module:\n  "
            + "\n  ".join(rows)
            + "\nReplace them before saving the module (relay.transform.SimplifyInference, "
            "DynamicToStatic and CanonicalizeOps do that for many).",
            code="RQ202",
        )


def _reachable(module: syntax.Module) -> Iterator[syntax.Expr]:
    """Yield all expressions of main and of the functions it names."""
    seen = {"main"}
    waiting: list[tuple[syntax.Expr, int]] = [(module.functions["main"], 0)]
    while waiting:
        expr, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ModelError(
                f"The expression at {expr.where} is nested deeper than {MAX_DEPTH}. Give inner "
                "values names: %0 = ...;",
                code="RQ202",
            )
        yield expr
        if isinstance(expr, syntax.GlobalRef) and expr.name not in seen:
            seen.add(expr.name)
            if expr.name in module.functions:
                waiting.append((module.functions[expr.name], 0))
        waiting += [(child, depth + 1) for child in reversed(syntax.children(expr))]


class _ModuleBuilder:
    """Builds main of one module."""

    def __init__(
        self,
        module: syntax.Module,
        params: dict[str, Any],
        shapes: dict[str, Any],
        release: WrittenBy | None,
    ) -> None:
        self.module = module
        self.params = params
        self.shapes = shapes
        self.release = release
        self.inputs: list[relax.Var] = []
        self.emitter = RelayEmitter(MAX_VALUES)
        self.depth = 0
        self.running: list[syntax.Function] = []

    def build(self, main: syntax.Function) -> tvm.IRModule:
        scope: MutableMapping[str, Any] = ChainMap()
        for param in list_parameters(main):
            if param.name in scope:
                raise _fail(param.where, f"two parameters are called %{param.name}.")
            scope[param.name] = self.bind_param(param)
        value = self.block(main.body, scope, "output")
        if main.result_type is not None:
            self.check_type(value, main.result_type, main.where, "@main returns")
        function = self.emitter.finish(self.inputs, self.join(value, main.body.where))
        sources = {name: {"node": name, "op": op} for name, op in self.emitter.sources.items()}
        unnamed = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        return Editor(unnamed).build({SOURCES_ATTR: json.dumps(sources)})

    # -- parameters --------------------------------------------------------------------------------

    def bind_param(self, param: syntax.Param) -> relax.Expr:
        """Return the input of main, or the constant given for it."""
        kind = param.type
        if not isinstance(kind, syntax.TensorType):
            raise _fail(
                param.where,
                f"parameter %{param.name} of @main has type {kind or 'none'}; allowed: tensors.",
            )
        shape = self.fix_shape(param, kind)
        if param.name not in self.params:
            self.emitter.reserve(param.name)
            dims = [
                tvm.tirx.Var(f"{param.name}_dim{axis}", "int64") if dim is None else dim
                for axis, dim in enumerate(shape)
            ]
            try:
                var = relax.Var(param.name, relax.TensorType(dims, kind.dtype))
            except Exception as error:
                raise _fail(param.where, f"{kind} is not a type of Relax: {error}") from error
            self.inputs.append(var)
            return var
        value = self.params[param.name]
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        fits = len(array.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, array.shape, strict=True)
        )
        if not fits or str(array.dtype) != kind.dtype:
            raise _fail(
                param.where,
                f"params[{param.name!r}] is {array.dtype} of shape {array.shape}; @main wants "
                f"{kind}.",
            )
        return make_const(array)

    def fix_shape(self, param: syntax.Param, kind: syntax.TensorType) -> tuple[int | None, ...]:
        wanted = self.shapes.get(param.name)
        if wanted is None:
            return kind.shape
        wanted = tuple(wanted)
        if len(wanted) != len(kind.shape) or not all(
            isinstance(new, int) and (old is None or old == new)
            for new, old in zip(wanted, kind.shape, strict=False)
        ):
            raise ModelError(
                f"shapes[{param.name!r}] is {wanted}, but the parameter is {kind}; allowed: one "
                "integer for each dimension, the same where one is given.",
                code="RQ101",
            )
        return wanted

    # -- expressions -------------------------------------------------------------------------------

    def block(self, block: syntax.Block, scope: MutableMapping[str, Any], name: str) -> Value:
        """Convert a block and return its value, named `name`."""
        for statement in block.statements:
            if isinstance(statement, syntax.FreeVar):
                if statement.param.name not in scope:
                    raise _fail(
                        statement.param.where, "free_var is allowed at the start of main only."
                    )
                continue
            inner = name_inside(name, statement.name)
            value = self.evaluate(statement.value, scope, inner)
            if statement.type is not None:
                self.check_type(value, statement.type, statement.where, f"%{statement.name} is")
            scope[statement.name] = value
        return self.evaluate(block.result, scope, name)

    def evaluate(self, expr: syntax.Expr, scope: MutableMapping[str, Any], name: str) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _fail(expr.where, f"functions are nested deeper than {MAX_DEPTH}.")
        try:
            return self._evaluate(expr, scope, name)
        finally:
            self.depth -= 1

    def _evaluate(self, expr: syntax.Expr, scope: MutableMapping[str, Any], name: str) -> Any:
        if isinstance(expr, syntax.Ref):
            return self.look_up(expr, scope)
        if isinstance(expr, syntax.Constant):
            return make_const(expr.value)
        if isinstance(expr, syntax.OpCall):
            return self.call_operator(expr, scope, name)
        if isinstance(expr, syntax.TupleExpr):
            return tuple(
                self.evaluate(field, scope, f"{name}.{i}") for i, field in enumerate(expr.fields)
            )
        if isinstance(expr, syntax.GetItem):
            value = self.evaluate(expr.tuple_value, scope, f"{name}.1")
            return self.project(value, expr.index, expr.where, name)
        if isinstance(expr, syntax.FunctionCall):
            return self.call_function(expr, scope, name)
        if isinstance(expr, syntax.Function):
            return _Closure(expr, scope)
        if isinstance(expr, syntax.GlobalRef):
            if expr.name not in self.module.functions:
                raise _fail(
                    expr.where,
                    f"there is no function @{expr.name}. "
                    f"{suggest_name(expr.name, self.module.functions)}",
                )
            return _Closure(self.module.functions[expr.name], ChainMap())
        if isinstance(expr, syntax.Block):
            return self.block(expr, _inner(scope), name)
        return self.branch(expr, scope, name)

    def look_up(self, ref: syntax.Ref, scope: Mapping[str, Any]) -> Any:
        """Look up the value of a name: `x.0` is a variable of this name, or else field 0 of `x`."""
        name, fields = ref.name, list[int]()
        while name not in scope:
            name, dot, field = name.rpartition(".")
            if not dot or not field.isdecimal() or len(field) > 9:
                raise _fail(
                    ref.where, f"%{ref.name} is not defined. {suggest_name(ref.name, scope)}"
                )
            fields.append(int(field))
        value = scope[name]
        for field in reversed(fields):
            value = self.project(value, field, ref.where, f"{name}.{field}")
        return value

    def project(self, value: Any, index: int, where: syntax.Location, name: str) -> Any:
        count = len(value) if isinstance(value, tuple) else 0
        if isinstance(value, relax.Expr) and isinstance(value.ty, relax.TupleType):
            count = len(value.ty.fields)
        if not 0 <= index < count:
            raise _fail(where, f"there is no field {index} in {describe_type(value)}.")
        if isinstance(value, tuple):
            return value[index]
        return self.emitter.emit(relax.TupleGetItem(value, index), name, "tuple field")

    def call_operator(
        self, call: syntax.OpCall, scope: MutableMapping[str, Any], name: str
    ) -> Value:
        row = OPERATORS[call.op]
        args = tuple(
            self.evaluate(arg, scope, f"{name}.{i + 1}") for i, arg in enumerate(call.args)
        )
        try:
            if not row.min_args <= len(args) <= row.max_args:
                raise ModelError(
                    f"it has {format_count(len(args), 'argument')}; allowed: {row.min_args}"
                    + (f" to {row.max_args}." if row.max_args > row.min_args else "."),
                    code="RQ202",
                )
            attrs = complete_attrs(row.attrs, call.attrs)
            written = frozenset(call.attrs)
            site = Site(call.op, args, attrs, written, self.emitter, name, self.release)
            value = row.convert(site)
            if isinstance(value, relax.Expr) and not isinstance(value, _LEAVES):
                value = self.emitter.emit(value, name, call.op)
        except RelayQuantError as error:
            raise _fail(call.where, f"{call.op}: {error}") from error
        except Exception as error:
            # TVM raises any error of its C++ code: TypeError, InternalError, ...
            raise _fail(call.where, f"{call.op}: {readable(error)}") from error
        return value

    def call_function(
        self, call: syntax.FunctionCall, scope: MutableMapping[str, Any], name: str
    ) -> Any:
        """Inline a function: its values are named `name.x`, its result `name`."""
        closure = self.evaluate(call.function, scope, f"{name}.0")
        if not isinstance(closure, _Closure):
            raise _fail(call.where, f"{describe_type(closure)} is called, but is not a function.")
        function = closure.function
        if any(function is outer for outer in self.running):
            raise _fail(call.where, "a function calls itself, which is not supported.")
        if len(call.args) != len(function.params):
            raise _fail(
                call.where,
                f"a function of {format_count(len(function.params), 'parameter')} is called with "
                f"{format_count(len(call.args), 'argument')}.",
            )
        inner = _inner(closure.scope)
        for i, (param, arg) in enumerate(zip(function.params, call.args, strict=True)):
            value = self.evaluate(arg, scope, f"{name}.{i + 1}")
            if param.type is not None:
                self.check_type(value, param.type, call.where, f"argument %{param.name} is")
            inner[param.name] = value
        self.emitter.count_inlined()
        self.running.append(function)
        value = self.block(function.body, inner, name)
        self.running.pop()
        if function.result_type is not None:
            self.check_type(value, function.result_type, call.where, "the function returns")
        return value

    def branch(self, expr: syntax.If, scope: MutableMapping[str, Any], name: str) -> Any:
        condition = self.evaluate(expr.condition, scope, f"{name}.1")
        if not isinstance(condition, tvm.ir.GenericConst):
            raise _fail(
                expr.where,
                "the condition of `if` is known at run time only, which is not supported. Save the "
                "model for one fixed path.",
            )
        array = condition.value.numpy()
        if array.size != 1:
            raise _fail(expr.where, f"the condition of `if` has shape {array.shape}; allowed: ().")
        chosen = expr.then if array.item() else expr.otherwise
        return self.block(chosen, _inner(scope), name)

    # -- types and results -------------------------------------------------------------------------

    def check_type(
        self, value: Any, declared: syntax.Type, where: syntax.Location, what: str
    ) -> None:
        if not fits_type(value, declared):
            raise _fail(where, f"{what} {describe_type(value)}, declared is {declared}.")

    def join(self, value: Any, where: syntax.Location) -> relax.Expr:
        """Return main's result as one expression, with its tuples."""
        if isinstance(value, tuple):
            return relax.Tuple([self.join(field, where) for field in value])
        if not isinstance(value, relax.Expr):
            raise _fail(where, "@main returns a function; allowed: tensors and tuples of them.")
        return value


def name_inside(owner: str, name: str) -> str:
    """Return the name of a value inside the function inlined for `owner`. Values of main have no
    prefix.
    """
    return name if owner == "output" else f"{owner}.{name}"


def describe_type(value: Any) -> str:
    """Describe the type of a value in Relay's terms."""
    if isinstance(value, tuple):
        return f"({', '.join(map(describe_type, value))})"
    if not isinstance(value, relax.Expr):
        return "a function"
    if isinstance(value.ty, relax.TupleType):
        return f"a tuple of {len(value.ty.fields)}"
    shape = tensor_shape(value)
    if shape is None:
        return f"a tensor of unknown shape, {tensor_dtype(value)}"
    return str(
        syntax.TensorType(
            tuple(dim if isinstance(dim, int) else None for dim in shape), tensor_dtype(value)
        )
    )


def fits_type(value: Any, declared: syntax.Type) -> bool:
    """Return whether the inferred type of a value is consistent with a declared type."""
    if isinstance(declared, syntax.OpaqueType):
        return True
    if isinstance(declared, syntax.TupleType):
        if isinstance(value, relax.Expr):
            return isinstance(value.ty, relax.TupleType) and len(value.ty.fields) == len(
                declared.fields
            )
        return (
            isinstance(value, tuple)
            and len(value) == len(declared.fields)
            and all(map(fits_type, value, declared.fields))
        )
    if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
        return False
    shape = tensor_shape(value)
    if tensor_dtype(value) not in ("", declared.dtype):
        return False
    return shape is None or (
        len(shape) == len(declared.shape)
        and all(
            want is None or not isinstance(have, int) or want == have
            for have, want in zip(shape, declared.shape, strict=True)
        )
    )


def readable(error: Exception) -> str:
    """Return the message of a C++ error without its stack trace and its dumps of operators."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    text = re.sub(r'ir\.Op\(.*?name="relax\.([^"]+)".*?support_level=\d+\)', r"\1", text)
    return re.sub(r"T\.(?:int64\((-?\d+)\)|(\w+))", r"\1\2", text)


def _inner(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return scope.new_child() if isinstance(scope, ChainMap) else ChainMap({}, scope)


def _fail(where: syntax.Location, message: str) -> ModelError:
    return ModelError(f"The Relay module is wrong at {where}: {message}", code="RQ202")
