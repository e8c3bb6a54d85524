"""The QConfig of each operator: the lines of a QConfigMapping, and the operators that they select.

annotate reads the user's mapping. Names and precedence follow PyTorch's FX Graph Mode Quantization.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from relayquant.base.plain_data import check_keys, check_list, check_mapping
from relayquant.config.onnx_names import find_operators
from relayquant.config.qconfig import FloatConfig, QConfig, read_qconfig, write_qconfig
from relayquant.config.relay_names import RELAY_NAMES
from relayquant.config.torch_names import TORCH_NAMES, name_class, name_function
from relayquant.errors import ConfigError


class Selector(enum.Enum):
    """The kind of selection of a QConfigMapping line.

    Later members win over earlier members, as in FX. `QConfigMapping` describes the precedence
    between two lines of the same kind.
    """

    GLOBAL = "global"
    OBJECT_TYPE = "object_type"
    MODULE_CLASS = "module_class"
    MODULE_NAME_REGEX = "module_name_regex"
    MODULE_NAME = "module_name"
    MODULE_NAME_OBJECT_TYPE_ORDER = "module_name_object_type_order"


@dataclass(frozen=True)
class OperatorSite:
    """The facts about an operator that mapping lines select by.

    Attributes:
        names: Names of its values, and of its nodes in the source model.
        op: Its main operator, e.g. "relax.nn.conv2d".
        pattern: Its pattern, "" if none.
        place: Position of its main operator in `peers`.
        peers: Names (of the value and its source node) of every operator of the same type, in
            topological order.
        main_names: Those of `names` that belong to the main operator alone: not to a bias or an
            activation that its pattern absorbed.
    """

    names: tuple[str, ...]
    op: str
    pattern: str = ""
    place: int = 0
    peers: tuple[tuple[str, ...], ...] = ()
    main_names: tuple[str, ...] = ()

    def find_order(self, module: str) -> int | None:
        """Count the operators of this type before it below `module`. None if it is not below
        `module`.
        """
        if not any(is_below(name, module) for name in self.names):
            return None
        earlier = self.peers[: self.place]
        return sum(any(is_below(name, module) for name in names) for names in earlier)


def is_below(name: str, module: str) -> bool:
    """Whether a value is `module` or belongs to it ("module.x", "module/x").

    Every value belongs to "".
    """
    module = module.rstrip("./")
    # Usually the first letters differ: a mapping of many lines asks for each line and operator.
    return name.startswith(module) and (not module or name[len(module) :][:1] in ("", ".", "/"))


def count_parts(module: str) -> int:
    """Return the depth of a name: 2 for "stage1/conv_a" and "stage1.conv_a".

    The whole model, "", has depth 0.
    """
    return len([part for part in re.split(r"[./]", module) if part])


def is_type(op: str, pattern: str, wanted: str) -> bool:
    """Whether `wanted` names this operator or this pattern.

    Operator names are "relax.nn.conv2d", "nn.conv2d", "conv2d", Relay names such as "nn.dense",
    names of PyTorch such as "aten.linear", or types of ONNX and OpenVINO such as "Conv".
    """
    if wanted in (op, op.removeprefix("relax."), op.rsplit(".", 1)[-1]):
        return True
    if wanted == pattern != "":
        return True
    if wanted in TORCH_NAMES:
        return any(named.is_site(op, pattern) for named in TORCH_NAMES[wanted])
    if wanted in RELAY_NAMES:
        return RELAY_NAMES[wanted].is_site(op, pattern)
    return op in find_operators(wanted)


@dataclass(frozen=True)
class MappingRule:
    """One line of a QConfigMapping: a selection of operators and their QConfig.

    None keeps the operators in float.

    Attributes:
        kind: Kind of selection.
        key: Operator type or pattern, class of modules, regular expression, or name.
        qconfig: How the selected operators are quantized.
        object_type, index: For MODULE_NAME_OBJECT_TYPE_ORDER with the name in `key`: the operator
            type, and its number below the name, from 0 in topological order.
        modules: For MODULE_CLASS: the paths of the modules of this class. `relayquant.torch` sets
            them, because it has the model.
        optional: Whether the line may select no operator, as in a mapping for many models.
        origin: Source of a line that the user did not write, such as "skip_conv_layers=[0]". The
            ledger shows it instead of the line.
        rows: (pattern, QConfig) of backend rows that have their own QConfig, which replaces
            `qconfig` at their operators. Only `BackendConfig.default_mapping` sets them.
    """

    kind: Selector
    key: str
    qconfig: QConfig | FloatConfig | None
    object_type: str = ""
    index: int = 0
    optional: bool = False
    origin: str = ""
    modules: tuple[str, ...] = ()
    rows: tuple[tuple[str, QConfig], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Selector):
            raise ConfigError(
                f"MappingRule.kind is {self.kind!r}; allowed: a Selector.", code="RQ101"
            )
        where = f"QConfigMapping.set_{self.kind.value}"
        if self.qconfig is not None and not isinstance(self.qconfig, QConfig | FloatConfig):
            raise ConfigError(
                f"{where}: expected a QConfig or None (keep in float) or FLOAT16, got "
                f"{type(self.qconfig).__name__}.",
                code="RQ101",
            )
        if not isinstance(self.key, str) or not isinstance(self.object_type, str):
            raise ConfigError(
                f"{where}: {self.key!r} is no text; allowed: a name as text.", code="RQ101"
            )
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise ConfigError(
                f"{where}: index is {self.index!r}; allowed: an integer >= 0.", code="RQ101"
            )
        if not isinstance(self.optional, bool):
            raise ConfigError(
                f"{where}: optional is {self.optional!r}; allowed: True or False.", code="RQ101"
            )
        if not isinstance(self.origin, str):
            raise ConfigError(f"{where}: origin is {self.origin!r}; allowed: text.", code="RQ101")
        if self.kind is Selector.MODULE_NAME_REGEX:
            try:
                re.compile(self.key)
            except re.error as error:
                raise ConfigError(
                    f"{where}: {self.key!r} is no regular expression: {error}.", code="RQ101"
                ) from error

    @property
    def selection(self) -> tuple[Selector, str, str, int]:
        """What the line selects by. Lines with the same selection replace each other."""
        return self.kind, self.key, self.object_type, self.index

    @property
    def description(self) -> str:
        """A text for the ledger and messages, such as "object_type 'conv2d'"."""
        if self.kind is Selector.GLOBAL:
            return "global"
        more = ""
        if self.kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            more = f", {self.object_type!r}, {self.index}"
        return f"{self.kind.value} {self.key!r}{more}"

    def selects(self, site: OperatorSite) -> bool:
        """Whether the rule selects an operator."""
        if self.kind is Selector.OBJECT_TYPE:
            return is_type(site.op, site.pattern, self.key)
        if self.kind is Selector.MODULE_CLASS:
            return self.find_depth(site) >= 0
        if self.kind is Selector.MODULE_NAME_REGEX:
            return any(re.fullmatch(self.key, name) for name in site.names)
        if self.kind is Selector.MODULE_NAME:
            return any(is_below(name, self.key) for name in site.names)
        if self.kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            is_wanted = is_type(site.op, "", self.object_type)
            return is_wanted and site.find_order(self.key) == self.index
        return True

    def find_depth(self, site: OperatorSite) -> int:
        """Return the depth of the innermost of `modules` that holds an operator. -1 if none does.

        Only the names of its main operator count: a convolution that absorbed a ReLU is none of the
        ReLU's module.
        """
        names = site.main_names
        found = (path for path in self.modules if any(is_below(name, path) for name in names))
        return max(map(count_parts, found), default=-1)

    def rank(self, site: OperatorSite) -> int:
        """Return the rank of the line. Between two lines of the same kind, the higher rank
        decides.
        """
        if self.kind is Selector.OBJECT_TYPE:
            return int(self.key == site.pattern)  # a pattern is more specific than its operator
        if self.kind is Selector.MODULE_CLASS:
            return self.find_depth(site)
        if self.kind in (Selector.MODULE_NAME, Selector.MODULE_NAME_OBJECT_TYPE_ORDER):
            return count_parts(self.key)
        return 0

    def to_dict(self) -> dict[str, Any]:
        """Return {"key": ..., "qconfig": ...}, with "object_type" and "index" if they are used."""
        data: dict[str, Any] = {"key": self.key, "qconfig": write_qconfig(self.qconfig)}
        if self.kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            data |= {"object_type": self.object_type, "index": self.index}
        data |= {"modules": list(self.modules)} if self.modules else {}
        data |= {"rows": {name: row.to_dict() for name, row in self.rows}} if self.rows else {}
        data |= {"optional": True} if self.optional else {}
        return data | ({"origin": self.origin} if self.origin else {})

    @staticmethod
    def from_dict(kind: Selector, data: object, where: str) -> MappingRule:
        """Read the data of `to_dict`."""
        needed = ["key", "qconfig"]
        if kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            needed += ["object_type", "index"]
        more = ["modules"] if kind is Selector.MODULE_CLASS else []
        known = [*needed, *more, "optional", "origin", "rows"]
        found = dict(check_keys(data, known, where, needed))
        qconfig = read_qconfig(found.pop("qconfig"), f"{where}.qconfig")
        if more:
            found["modules"] = tuple(check_list(found.get("modules", ()), f"{where}.modules"))
        rows = check_mapping(found.pop("rows", {}), f"{where}.rows")
        found["rows"] = tuple(
            (name, QConfig.from_dict(row, f"{where}.rows.{name}")) for name, row in rows.items()
        )
        return MappingRule(kind, found.pop("key"), qconfig, **found)


@dataclass(frozen=True)
class QConfigMapping:
    """The QConfig of each operator. None keeps an operator in float, FLOAT16 computes it in
    float16.

    Precedence is the same as in torch.ao.quantization.QConfigMapping: global < object type < class
    of modules < name regex < name < name, type and order.

    - Several matching regular expressions: the first that was set decides.
    - Several names: the longest name decides ("stage1/conv_a" before "stage1").
    - Several types: a pattern ("conv2d_relu") decides before its operator ("conv2d").
    - Several classes: the class of the innermost module decides.
    - A tie, for example two names of one fused operator: the last line that was set decides.

    A name is the name of a value in the prepared model or of a node in the source model.
    `rq.prepare(mod, params).plan.operators` lists both. A line that selects no operator raises an
    error when the model is prepared. A line that selects operators but decides none of them gives a
    warning, or with `strict` an error.
    """

    rules: tuple[MappingRule, ...] = ()

    def set_global(self, qconfig: QConfig | FloatConfig | None) -> QConfigMapping:
        """Set the QConfig of every operator that no other line selects."""
        return self._add(MappingRule(Selector.GLOBAL, "", qconfig))

    def set_object_type(
        self,
        op: str | type | Callable[..., Any],
        qconfig: QConfig | FloatConfig | None,
        *,
        optional: bool = False,
    ) -> QConfigMapping:
        """Set the QConfig of an operator type or a pattern, or of the modules of a class.

        Types are "relax.nn.conv2d", "nn.conv2d", "conv2d", Relay names ("nn.dense", "concatenate"),
        types of ONNX and OpenVINO ("Conv", "Convolution"), or functions of PyTorch
        (`torch.nn.functional.linear`, `torch.add`), which also select the modules that call them. A
        class (`torch.nn.Linear`, or your own) selects the operators of its modules, and of modules
        inside them, in `relayquant.torch.quantize`, `prepare` and `prepare_qat`. Subclasses count
        too. With `optional`, the model may have none.
        """
        if isinstance(op, type):
            rule = MappingRule(Selector.MODULE_CLASS, name_class(op), qconfig, optional=optional)
            return self._add(rule)
        name = op if isinstance(op, str) or not callable(op) else name_function(op)
        return self._add(MappingRule(Selector.OBJECT_TYPE, name, qconfig, optional=optional))

    def set_module_name_regex(
        self, regex: str, qconfig: QConfig | FloatConfig | None
    ) -> QConfigMapping:
        """Set the QConfig of operators with a name that matches the whole regular expression.

        The first matching expression decides: set the special one before the general one.
        """
        return self._add(MappingRule(Selector.MODULE_NAME_REGEX, regex, qconfig))

    def set_module_name(self, name: str, qconfig: QConfig | FloatConfig | None) -> QConfigMapping:
        """Set the QConfig of the operator that computes `name` and of operators below it.

        Operators below it are "name.x" and "name/x". A longer name has precedence.
        """
        return self._add(MappingRule(Selector.MODULE_NAME, name, qconfig))

    def set_module_name_object_type_order(
        self,
        name: str,
        op: str | Callable[..., Any],
        index: int,
        qconfig: QConfig | FloatConfig | None,
        *,
        optional: bool = False,
    ) -> QConfigMapping:
        """Set the QConfig of operator number `index` of type `op` below `name`.

        Numbers start at 0. "" is the whole model. With `optional`, there may be fewer operators.
        """
        kind = Selector.MODULE_NAME_OBJECT_TYPE_ORDER
        if isinstance(op, type):
            raise ConfigError(
                f"QConfigMapping.set_{kind.value}: {op.__name__} is a class; allowed: an operator "
                "type as text, or a function such as torch.nn.functional.linear.",
                code="RQ101",
            )
        op = op if isinstance(op, str) or not callable(op) else name_function(op)
        return self._add(MappingRule(kind, name, qconfig, op, index, optional))

    def _add(self, rule: MappingRule) -> QConfigMapping:
        def is_replaced(other: MappingRule) -> bool:
            return other.selection == rule.selection

        if rule.kind is Selector.MODULE_NAME_REGEX and any(map(is_replaced, self.rules)):
            # A regular expression that is set again keeps its place, as in torch.
            return replace(
                self, rules=tuple(rule if is_replaced(other) else other for other in self.rules)
            )
        # Sorted by precedence of kinds, so that two equivalent mappings are equal.
        order = list(Selector)
        rules = [*(r for r in self.rules if not is_replaced(r)), rule]
        return replace(self, rules=tuple(sorted(rules, key=lambda r: order.index(r.kind))))

    def find_rule(self, site: OperatorSite) -> MappingRule | None:
        """Find the line that decides for an operator, with the QConfig of the operator's row."""
        for kind in reversed(Selector):
            found = [rule for rule in self.rules if rule.kind is kind and rule.selects(site)]
            if kind is not Selector.MODULE_NAME_REGEX:
                found.reverse()
            if found:
                rule = max(found, key=lambda rule: rule.rank(site))  # the first of equal rank
                own = dict(rule.rows).get(site.pattern)
                return rule if own is None else replace(rule, qconfig=own, origin="", rows=())
        return None

    def find_idle(self, sites: Iterable[OperatorSite]) -> tuple[MappingRule, ...]:
        """Find lines that decide for none of these operators because other lines do.

        The global line and optional lines are not reported.
        """
        deciding = [self.find_rule(site) for site in sites]
        return tuple(
            rule
            for rule in self.rules
            if rule.kind is not Selector.GLOBAL and not rule.optional and rule not in deciding
        )

    def change_qconfigs(self, change: Callable[[QConfig], QConfig]) -> QConfigMapping:
        """Return the mapping with every QConfig changed; what stays in float stays so."""
        return replace(
            self,
            rules=tuple(
                replace(
                    rule,
                    qconfig=change(rule.qconfig)
                    if isinstance(rule.qconfig, QConfig)
                    else rule.qconfig,
                    rows=tuple((name, change(qconfig)) for name, qconfig in rule.rows),
                )
                for rule in self.rules
            ),
        )

    def without(self, rules: Collection[MappingRule]) -> QConfigMapping:
        """Return the mapping without some lines."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule not in rules))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON and TOML.

        The form is {"global": qconfig, "object_type": [{"key": ..., "qconfig": ...}], ...}.

        A qconfig is a dict, "float" for None, or "float16". A global line with more than a QConfig
        is {"key": "", "qconfig": ..., ...}.
        """
        data: dict[str, Any] = {}
        for rule in self.rules:
            row = rule.to_dict()
            if rule.kind is Selector.GLOBAL:
                data[rule.kind.value] = row["qconfig"] if row.keys() == {"key", "qconfig"} else row
            else:
                data.setdefault(rule.kind.value, []).append(row)
        return data

    @staticmethod
    def from_dict(data: object, where: str = "QConfigMapping") -> QConfigMapping:
        """What `to_dict` wrote.

        Raises:
            ConfigError: an unknown key (names the nearest), a missing one, or a value not allowed.
        """
        found = check_keys(data, [kind.value for kind in Selector], where)
        mapping = QConfigMapping()
        for kind in Selector:
            value = found.get(kind.value, ())
            if kind is Selector.GLOBAL:
                path = f"{where}.{kind.value}"
                if isinstance(value, Mapping) and "qconfig" in value:
                    mapping = mapping._add(MappingRule.from_dict(kind, value, path))
                elif kind.value in found:
                    mapping = mapping.set_global(read_qconfig(value, path))
                continue
            for i, row in enumerate(check_list(value, f"{where}.{kind.value}")):
                rule = MappingRule.from_dict(kind, row, f"{where}.{kind.value}[{i}]")
                mapping = mapping._add(rule)
        return mapping
