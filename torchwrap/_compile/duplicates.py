"""Equal values of a graph, which Inductor computes in one loop but stores one by one. It imports Inductor."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.node import map_arg


class StoreOnce(CustomGraphPass):  # type: ignore[misc]
    """Stores a value once that a graph returns and also realizes, such as the stack of frames that a reset writes back.

    Two results stay two tensors.
    """

    def __call__(self, graph: Graph) -> None:
        """Changes a graph without mutations, except of its inputs at its end."""
        results = set(graph.output_node().all_input_nodes)
        numbers: dict[Any, int] = {}
        number: dict[Node, int] = {}
        stored: dict[int, Node] = {}
        for node in graph.nodes:
            number[node] = numbers.setdefault(_key(node, number), len(numbers))
            if node in results or any(user.target is torch.ops.aten.as_strided.default for user in node.users):
                first = stored.setdefault(number[node], node)
                if first is not node and not {first, node} <= results:
                    results |= {first} if node in results else set()
                    node.replace_all_uses_with(first)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Names this code in the key of Inductor's cache."""
        return get_hash_for_files((__file__,))


def _key(node: Node, number: dict[Node, int]) -> Any:
    # Nodes of the same key have the same value.
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return node
    if torch.Tag.nondeterministic_seeded in target.tags:
        return node
    return target, repr(map_arg((node.args, sorted(node.kwargs.items())), lambda argument: f"%{number[argument]}"))
