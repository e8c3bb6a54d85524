"""Which operator gets which QConfig: the lines of a QConfigMapping, and the operators they select.

The user's choice, read by annotate. Names and precedence follow PyTorch's FX Graph Mode
Quantization.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from relayquant.base.plain_data import check_keys, check_list
from relayquant.config.qconfig import FloatConfig, QConfig, read_qconfig, write_qconfig
from relayquant.config.relay_names import RELAY_NAMES
from relayquant.errors import ConfigError


class Selector(enum.Enum):
    """What a line of a QConfigMapping selects by. Later members win over earlier ones, as in FX;
    `QConfigMapping` says which of two lines of one kind wins.
    """

    GLOBAL = "global"
    OBJECT_TYPE = "object_type"
    MODULE_NAME_REGEX = "module_name_regex"
    MODULE_NAME = "module_name"
    MODULE_NAME_OBJECT_TYPE_ORDER = "module_name_object_type_order"


@dataclass(frozen=True)
class OperatorSite:
    """An operator as the lines of a mapping see it.

    Attributes:
        names: Names of its values, and of the nodes of the source model it came from.
        op: Its main operator, e.g. "relax.nn.conv2d".
        pattern: Its pattern, "" if none.
        place: Position of its main operator in `peers`.
        peers: Names (of the value and its source node) of every operator of the same type, in
            topological order.
    """

    names: tuple[str, ...]
    op: str
    pattern: str = ""
    place: int = 0
    peers: tuple[tuple[str, ...], ...] = ()

    def find_order(self, module: str) -> int | None:
        """How many operators of this type come before it below `module`; None when it is not below
        `module`.
        """
        if not any(is_below(name, module) for name in self.names):
            return None
        earlier = self.peers[: self.place]
        return sum(any(is_below(name, module) for name in names) for names in earlier)


def is_below(name: str, module: str) -> bool:
    """Whether a value is `module` or belongs to it ("module.x", "module/x"); every value belongs to
    "".
    """
    module = module.rstrip("./")
    return not module or name == module or name.startswith((module + ".", module + "/"))


def count_parts(module: str) -> int:
    """How deep a name is: 2 for "stage1/conv_a" and "stage1.conv_a", 0 for "", which is the whole
    model.
    """
    return len([part for part in re.split(r"[./]", module) if part])


def is_type(op: str, pattern: str, wanted: str) -> bool:
    """Whether `wanted` names this operator ("relax.nn.conv2d", "nn.conv2d", "conv2d", or as Relay
    does: "nn.dense") or this pattern.
    """
    if wanted in (op, op.removeprefix("relax."), op.rsplit(".", 1)[-1]):
        return True
    if wanted == pattern != "":
        return True
    return wanted in RELAY_NAMES and RELAY_NAMES[wanted].is_site(op, pattern)


@dataclass(frozen=True)
class MappingRule:
    """One line of a QConfigMapping: operators it selects and their QConfig (None keeps them in
    float).

    Attributes:
        kind: What it selects by.
        key: Operator type or pattern, regular expression, or name.
        qconfig: How the selected operators are quantized.
        object_type, index: For MODULE_NAME_OBJECT_TYPE_ORDER, beside the name in `key`: the
            operator, and which of those below the name, counted from 0 in topological order.
        optional: Whether the line may select no operator, as in a mapping for any model.
        origin: What the line follows from, if not from a call of the user: the ledger then says
            that instead of the line ("skip_conv_layers=[0]").
    """

    kind: Selector
    key: str
    qconfig: QConfig | FloatConfig | None
    object_type: str = ""
    index: int = 0
    optional: bool = False
    origin: str = ""

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
                f"{where}: {self.key!r} is no text; names are given as text.", code="RQ101"
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
    def description(self) -> str:
        """For the ledger and messages: "object_type 'conv2d'"."""
        if self.kind is Selector.GLOBAL:
            return "global"
        more = ""
        if self.kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            more = f", {self.object_type!r}, {self.index}"
        return f"{self.kind.value} {self.key!r}{more}"

    def selects(self, site: OperatorSite) -> bool:
        """Whether the rule speaks of an operator."""
        if self.kind is Selector.OBJECT_TYPE:
            return is_type(site.op, site.pattern, self.key)
        if self.kind is Selector.MODULE_NAME_REGEX:
            return any(re.fullmatch(self.key, name) for name in site.names)
        if self.kind is Selector.MODULE_NAME:
            return any(is_below(name, self.key) for name in site.names)
        if self.kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            is_wanted = is_type(site.op, "", self.object_type)
            return is_wanted and site.find_order(self.key) == self.index
        return True

    def rank(self, site: OperatorSite) -> int:
        """Of two lines of one kind that select an operator, the one of the higher rank decides."""
        if self.kind is Selector.OBJECT_TYPE:
            return int(self.key == site.pattern)  # a pattern says more than its operator
        if self.kind in (Selector.MODULE_NAME, Selector.MODULE_NAME_OBJECT_TYPE_ORDER):
            return count_parts(self.key)
        return 0

    def to_dict(self) -> dict[str, Any]:
        """{"key": ..., "qconfig": ...}, and "object_type" and "index" where they count."""
        data: dict[str, Any] = {"key": self.key, "qconfig": write_qconfig(self.qconfig)}
        if self.kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            data |= {"object_type": self.object_type, "index": self.index}
        data |= {"optional": True} if self.optional else {}
        return data | ({"origin": self.origin} if self.origin else {})

    @staticmethod
    def from_dict(kind: Selector, data: object, where: str) -> MappingRule:
        """What `to_dict` wrote."""
        needed = ["key", "qconfig"]
        if kind is Selector.MODULE_NAME_OBJECT_TYPE_ORDER:
            needed += ["object_type", "index"]
        found = dict(check_keys(data, [*needed, "optional", "origin"], where, needed))
        qconfig = read_qconfig(found.pop("qconfig"), f"{where}.qconfig")
        return MappingRule(kind, found.pop("key"), qconfig, **found)


@dataclass(frozen=True)
class QConfigMapping:
    """Which operators get which QConfig; None keeps an operator in float, FLOAT16 computes it in
    float16.

    Precedence as in torch.ao.quantization.QConfigMapping: global < object type < name regex < name
    < name, type and order. Of several regular expressions that match, the one set first decides; of
    several names the longest, in whatever order they were set ("stage1/conv_a" before "stage1"); of
    several types a pattern ("conv2d_relu") before its operator ("conv2d"). Where that leaves a tie,
    which two names of one fused operator may, the line set last decides.

    Names are those of the values in the prepared model and of the nodes in the source model;
    `rq.prepare(mod, params).plan.operators` lists them. A line that selects no operator is an error
    when the model is prepared; one that selects some, but decides none, is a warning (with `strict`
    an error).
    """

    rules: tuple[MappingRule, ...] = ()

    def set_global(self, qconfig: QConfig | FloatConfig | None) -> QConfigMapping:
        """For every operator that no other line selects."""
        return self._add(MappingRule(Selector.GLOBAL, "", qconfig))

    def set_object_type(
        self, op: str, qconfig: QConfig | FloatConfig | None, *, optional: bool = False
    ) -> QConfigMapping:
        """For an operator ("relax.nn.conv2d", "nn.conv2d", "conv2d"), also by its name in Relay
        ("nn.dense", "concatenate"), or a pattern by name. With `optional` the model may have none.
        """
        return self._add(MappingRule(Selector.OBJECT_TYPE, op, qconfig, optional=optional))

    def set_module_name_regex(
        self, regex: str, qconfig: QConfig | FloatConfig | None
    ) -> QConfigMapping:
        """For operators of which a name matches the whole regular expression. The first that was
        set and matches decides: set the special one before the general one.
        """
        return self._add(MappingRule(Selector.MODULE_NAME_REGEX, regex, qconfig))

    def set_module_name(self, name: str, qconfig: QConfig | FloatConfig | None) -> QConfigMapping:
        """For the operator that computes value `name`, and those below it ("name.x", "name/x"), but
        for those that a longer name selects.
        """
        return self._add(MappingRule(Selector.MODULE_NAME, name, qconfig))

    def set_module_name_object_type_order(
        self,
        name: str,
        op: str,
        index: int,
        qconfig: QConfig | FloatConfig | None,
        *,
        optional: bool = False,
    ) -> QConfigMapping:
        """For the operator of type `op` that is number `index`, from 0, of those below `name` ("":
        of all). With `optional` there may be fewer.
        """
        kind = Selector.MODULE_NAME_OBJECT_TYPE_ORDER
        return self._add(MappingRule(kind, name, qconfig, op, index, optional))

    def _add(self, rule: MappingRule) -> QConfigMapping:
        def is_replaced(other: MappingRule) -> bool:
            same = {"qconfig": None, "optional": False, "origin": ""}
            return replace(other, **same) == replace(rule, **same)

        if rule.kind is Selector.MODULE_NAME_REGEX and any(map(is_replaced, self.rules)):
            # Set again it keeps its place among the regular expressions, as in torch.
            return replace(
                self, rules=tuple(rule if is_replaced(other) else other for other in self.rules)
            )
        # By kind, as they win: two mappings that say the same are equal.
        order = list(Selector)
        rules = [*(r for r in self.rules if not is_replaced(r)), rule]
        return replace(self, rules=tuple(sorted(rules, key=lambda r: order.index(r.kind))))

    def find_rule(self, site: OperatorSite) -> MappingRule | None:
        """The line that decides for an operator."""
        for kind in reversed(Selector):
            found = [rule for rule in self.rules if rule.kind is kind and rule.selects(site)]
            if kind is not Selector.MODULE_NAME_REGEX:
                found.reverse()
            if found:
                return max(found, key=lambda rule: rule.rank(site))  # the first of equal rank
        return None

    def find_idle(self, sites: Iterable[OperatorSite]) -> tuple[MappingRule, ...]:
        """Lines that decide for none of these operators, since others do. That for all operators
        is not one of them: it is there for what no other line selects; nor are optional ones.
        """
        deciding = [self.find_rule(site) for site in sites]
        return tuple(
            rule
            for rule in self.rules
            if rule.kind is not Selector.GLOBAL and not rule.optional and rule not in deciding
        )

    def without(self, rules: Collection[MappingRule]) -> QConfigMapping:
        """The mapping without some of its lines."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule not in rules))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and TOML: {"global": qconfig, "object_type": [{"key": ..., "qconfig":
        ...}], ...}.

        A qconfig is a dict, "float" for None, or "float16".
        """
        data: dict[str, Any] = {}
        for rule in self.rules:
            row = rule.to_dict()
            if rule.kind is Selector.GLOBAL:
                data[rule.kind.value] = row["qconfig"]
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
                if kind.value in found:
                    mapping = mapping.set_global(read_qconfig(value, f"{where}.{kind.value}"))
                continue
            for i, row in enumerate(check_list(value, f"{where}.{kind.value}")):
                rule = MappingRule.from_dict(kind, row, f"{where}.{kind.value}[{i}]")
                mapping = mapping._add(rule)
        return mapping
