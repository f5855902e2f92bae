"""The YAML loader: PyYAML's safe loader, which also refuses duplicate keys and too large documents."""

from __future__ import annotations

from typing import Any

import yaml

from lightning_autosync.documents.limits import MOST_DIGITS, MOST_NODES, MOST_VALUES

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class Loader(yaml.SafeLoader):
    """Refuses duplicate keys (PyYAML would keep the last value) and documents that would need much memory."""

    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise ValueError(f"it has more than {MOST_NODES} values, the limit of YAML files; use JSON")
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if node.tag in _NUMBERS and len(node.value) > MOST_DIGITS:
            raise ValueError(
                f"a number has {len(node.value)} digits; allowed: at most {MOST_DIGITS} (line "
                f"{node.start_mark.line + 1})"
            )
        return node

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and (count := _expanded(node, {})) > MOST_VALUES:
            raise ValueError(f"its aliases expand to {count} values; allowed: at most {MOST_VALUES}")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked before merge keys (<<) are resolved, because a mapping may override merged keys.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise ValueError(f"key '{key.value}' is given twice (line {key.start_mark.line + 1})")
                seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Resolve merge keys (<<): own keys override merged ones, and earlier merged mappings override later ones.

        PyYAML 6.0.4 lets a merged key of one character win over the key that overrides it.
        """
        own: list[tuple[yaml.Node, yaml.Node]] = []
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:value":
                key.tag = "tag:yaml.org,2002:str"  # the key '='
            if key.tag != "tag:yaml.org,2002:merge":
                own.append((key, value))
                continue
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(part, yaml.MappingNode):
                    raise ValueError(f"<< merges mappings, not a {part.id} (line {part.start_mark.line + 1})")
                self.flatten_mapping(part)
                merged[:0] = part.value
        node.value = merged + own  # the last pair with a key counts


def _expanded(node: yaml.Node, known: dict[int, int | None]) -> int:
    """The number of values in a node, with aliases expanded.

    Args:
        node: root of the counted nodes.
        known: results by ``id`` of nodes; None while a node is being counted, which detects cycles.
    """
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise ValueError(f"an alias refers to a node that contains it (line {node.start_mark.line + 1})")
        return count
    known[id(node)] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    known[id(node)] = count = 1 + sum(_expanded(part, known) for part in parts)
    return count
