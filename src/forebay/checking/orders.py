"""Proves that an order of ops is one that their graph allows, and that its peak is what it says. No torch; shares no
code with the planners."""

from __future__ import annotations

from forebay.errors import PlanInvalid
from forebay.op_graph import Ordered

__all__ = ["check_order"]


def check_order(found: Ordered) -> None:
    """Runs the ops of ``found`` one by one on paper. Raises ``PlanInvalid`` for an op that is missing, there twice, or
    in front of what it needs, for a peak that is another one, and for one below the bound that no order is below."""
    graph = found.given
    if sorted(found.order) != list(range(len(graph.ops))):
        raise PlanInvalid(f"an order of {len(graph.ops)} ops has each of them once", action=-1, subject="order")
    made_by: list[list[int]] = [[] for _ in graph.ops]
    read_by: list[list[int]] = [[] for _ in graph.ops]
    for number, tensor in enumerate(graph.tensors):
        made_by[tensor.maker].append(number)
        for reader in set(tensor.readers):
            read_by[reader].append(number)
    waiting = [len(set(tensor.readers)) for tensor in graph.tensors]
    there, done = set[int](), set[int]()
    most = live = 0
    for op in found.order:
        name = graph.ops[op].name
        late = [other for other in graph.ops[op].after if other not in done]
        late += [graph.tensors[number].maker for number in read_by[op] if number not in there]
        if late:
            raise PlanInvalid(
                f"op {op} ({name}) runs before op {late[0]} ({graph.ops[late[0]].name}), which it has to come behind",
                action=op,
                subject=name,
            )
        there.update(made_by[op])
        live += sum(graph.tensors[number].nbytes for number in made_by[op])
        most = max(most, live)
        for number in read_by[op]:
            waiting[number] -= 1
        for number in {*read_by[op], *made_by[op]}:
            if not waiting[number] and not graph.tensors[number].kept:
                live -= graph.tensors[number].nbytes
        done.add(op)
    if found.peak != most:
        raise PlanInvalid(f"the order's peak is {most} bytes, it says {found.peak}", action=-1, subject="peak")
    if found.lower_bound > most:
        raise PlanInvalid(f"a bound of {found.lower_bound} bytes is above {most}", action=-1, subject="lower bound")
