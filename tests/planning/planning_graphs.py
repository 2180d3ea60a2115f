"""Graphs to plan for: random ones of every shape the rules speak of, and networks with the operations torch runs."""

from __future__ import annotations

import random

from gradfit.planning.simulate import KEEP, OFFLOAD, REBUILD, Segments
from gradfit.profiling.record import BackwardNode, Linear, Operation, Profile, Value


def random_profile(
    seed: int, operations: int, *, odd: bool = True, branchy: float = 0.5, bandwidth: float = 0.0
) -> Profile:
    """A random forward pass and a backward pass that needs some of it; `odd`: in-place, multi-output, no replay."""
    rng = random.Random(seed)
    values = [Value(Linear(rng.randint(1, 99)), None, i, operations) for i in range(2)]
    ops: list[Operation] = []
    for index in range(operations):
        live = [i for i, v in enumerate(values) if not v.overwritten]
        recent = [i for i in live if values[i].operation is not None][-3:]
        inputs = {rng.choice(recent) if recent else 0}
        if rng.random() < branchy:
            inputs.add(rng.choice(live))
        overwrites: tuple[int, ...] = ()
        if odd and recent and rng.random() < 0.2:
            old = rng.choice([i for i in inputs])
            overwrites = (old,)
            values[old] = Value(values[old].nbytes, values[old].operation, values[old].storage, values[old].dies, True)
            outputs = [len(values)]
            values.append(Value(values[old].nbytes, index, values[old].storage, 0))
        else:
            outputs = [len(values) + i for i in range(2 if odd and rng.random() < 0.2 else 1)]
            values += [Value(Linear(rng.randint(1, 100)), index, o, 0) for o in outputs]
        ops.append(
            Operation(
                f"op{index}",
                tuple(sorted(inputs)),
                tuple(outputs),
                overwrites,
                Linear(rng.choice([1.0, 2.0, 5.0, 10.0])),
                Linear(rng.choice([0, 0, 0, 20])),
                not (odd and rng.random() < 0.05),
                module=f"block{index // 8}",
                source=f"model.py:{index}",
            )
        )
    readers: dict[int, int] = {}
    for index, op in enumerate(ops):
        for v in op.inputs:
            readers[v] = index
    for i, v in enumerate(values):
        if v.operation is not None:
            dies = (
                operations
                if i == len(values) - 1
                else min(operations - 1, readers.get(i, v.operation) + rng.randint(0, 1))
            )
            values[i] = Value(v.nbytes, v.operation, v.storage, dies, v.overwritten)
    nodes: list[BackwardNode] = []
    flow = 0
    for index in reversed(range(operations)):
        if rng.random() < 0.2:
            continue
        candidates = [v for v in (*ops[index].inputs, *ops[index].outputs) if not values[v].overwritten]
        needs = tuple(v for v in candidates if rng.random() < 0.6)
        after = rng.randint(0, 60)
        nodes.append(
            BackwardNode(
                f"{ops[index].name}Backward",
                needs,
                Linear(2.0),
                Linear(flow),
                Linear(max(flow, after) + 20),
                Linear(after),
            )
        )
        flow = after
    return Profile(
        tuple(values), tuple(ops), tuple(nodes), parameter_bytes=50, gradient_bytes=50, optimizer_burst_bytes=10,
        batch_size=1, host_bandwidth=bandwidth,
    )  # fmt: skip


def random_plan(profile: Profile, seed: int, *, levels: bool) -> tuple[list[int], Segments]:
    """Any legal actions, and any tree of segments."""
    rng = random.Random(seed)
    odds = rng.random()
    actions = []
    for value in profile.values:
        if value.operation is None or not value.overwritten:
            action = KEEP if rng.random() < odds else REBUILD
            if profile.host_bandwidth and rng.random() < 0.2:
                action = OFFLOAD
        else:
            action = REBUILD
        actions.append(KEEP if value.operation is None else action)
    parent = [-1]
    for index in range(1, rng.randint(1, 6) if levels else 1):
        parent.append(rng.randrange(index))
    return actions, Segments([rng.randrange(len(parent)) for _ in actions], parent)
