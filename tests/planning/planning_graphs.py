"""Graphs to plan for: random ones of every shape the rules speak of, and networks with the
operations torch runs.
"""

from __future__ import annotations

import random
from dataclasses import replace

from gradfit.planning.simulate import KEEP, OFFLOAD, REBUILD, Segments
from gradfit.profiling.profile import BackwardNode, Linear, Operation, Profile, Value


def random_profile(
    seed: int, operations: int, *, odd: bool = True, branchy: float = 0.5, bandwidth: float = 0.0
) -> Profile:
    """A random forward pass and a backward pass that needs some of it; `odd`: in-place,
    multi-output, no replay.
    """
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
            old = rng.choice(sorted(inputs))
            overwrites = (old,)
            values[old] = Value(
                values[old].nbytes,
                values[old].operation,
                values[old].storage,
                values[old].dies,
                True,
            )
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
    for i, value in enumerate(values):
        if value.operation is not None:
            dies = (
                operations
                if i == len(values) - 1
                else min(operations - 1, readers.get(i, value.operation) + rng.randint(0, 1))
            )
            values[i] = Value(value.nbytes, value.operation, value.storage, dies, value.overwritten)
    nodes: list[BackwardNode] = []
    flow = 0
    for index in reversed(range(operations)):
        if rng.random() < 0.2:
            continue
        candidates = [
            v for v in (*ops[index].inputs, *ops[index].outputs) if not values[v].overwritten
        ]
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
        tuple(values), tuple(ops), tuple(nodes), parameter_bytes=50, gradient_bytes=50,
        optimizer_burst_bytes=10, batch_size=1, host_bandwidth=bandwidth,
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
    parent = [-1, *(rng.randrange(index) for index in range(1, rng.randint(1, 6) if levels else 1))]
    return actions, Segments([rng.randrange(len(parent)) for _ in actions], parent)


class Builder:
    """Writes a profile operation by operation; seconds from a roofline (flops, bytes moved, a fixed
    cost per call).
    """

    flops_per_second, bytes_per_second, call_seconds = 100e9, 10e9, 5e-6

    def __init__(self) -> None:
        self.sizes: list[float] = []  # bytes per item
        self.made: list[int | None] = []
        self.storages: list[int] = []
        self.overwritten: list[bool] = []
        self.readers: dict[int, int] = {}
        self.ops: list[Operation] = []
        self.tape: list[tuple[str, tuple[int, ...], float, float, float, str]] = []
        self.parameter_bytes = 0
        self.module = ""

    def value(self, size: float, op: int | None, storage: int | None = None) -> int:
        self.sizes.append(size)
        self.made.append(op)
        self.overwritten.append(False)
        self.storages.append(len(self.storages) + 10**6 if storage is None else storage)
        return len(self.sizes) - 1

    def parameter(self, nbytes: int) -> int:
        self.parameter_bytes += nbytes
        return self.value(0, None)

    def op(
        self,
        name: str,
        inputs: list[int],
        sizes: list[float],
        *,
        flops: float = 0.0,
        saves: list[int] | None = None,
        save_outputs: tuple[int, ...] = (),
        inplace: int | None = None,
        random: bool = False,
        grads: bool = True,
    ) -> list[int]:
        """`saves`: which inputs, `save_outputs`: which outputs backward needs; gradients in flight
        follow the sizes.
        """
        index = len(self.ops)
        if inplace is not None:
            outputs = [self.value(self.sizes[inplace], index, self.storages[inplace])]
            self.overwritten[inplace] = True
        else:
            outputs = [self.value(size, index) for size in sizes]
        moved = sum(self.sizes[v] for v in (*inputs, *outputs))
        per_item = flops / self.flops_per_second + moved / self.bytes_per_second
        for v in inputs:
            self.readers[v] = index
        self.ops.append(
            Operation( name, tuple(inputs), tuple(outputs), () if inplace is None else (inplace,),
            Linear(self.call_seconds, per_item), random=random, module=self.module,
            source=f"model.py:{name}", )
        )  # fmt: skip
        if grads:
            needs = tuple(saves or []) + tuple(outputs[i] for i in save_outputs)
            into = sum(self.sizes[v] for v in inputs if self.made[v] is not None)
            self.tape.append(
                (
                    name,
                    needs,
                    per_item * (2 if flops else 1),
                    sum(self.sizes[v] for v in outputs),
                    into,
                    self.module,
                )
            )
        return outputs

    def dropout(self, x: int) -> int:
        (empty,) = self.op("empty_like", [x], [self.sizes[x]], grads=False)
        (mask,) = self.op("bernoulli_", [empty], [], inplace=empty, random=True, grads=False)
        (scaled,) = self.op("div_", [mask], [], inplace=mask, grads=False)
        return self.op("mul", [x, scaled], [self.sizes[x]], saves=[scaled])[0]

    def norm(self, x: int) -> int:
        size = self.sizes[x]
        out, mean, rstd = self.op(
            "native_layer_norm", [x, self.parameter(4096)], [size, size / 256, size / 256]
        )
        self.tape[-1] = (*self.tape[-1][:1], (x, mean, rstd), *self.tape[-1][2:])
        return out

    def linear(self, x: int, rows: int, fan_in: int, fan_out: int) -> int:
        weight = self.parameter(fan_in * fan_out * 4)
        flops = 2.0 * rows * fan_in * fan_out
        return self.op(
            "addmm", [x, weight], [rows * fan_out * 4.0], flops=flops, saves=[x, weight]
        )[0]

    def profile(self, batch_size: int = 8) -> Profile:
        operations = len(self.ops)
        values = tuple(
            Value( Linear(0, size), made, storage, operations if made is None or index ==
            len(self.sizes) - 1 else self.readers.get(index, made), over, ) for index, (size, made,
            storage, over) in enumerate( zip(self.sizes, self.made, self.storages, self.overwritten,
            strict=True) )
        )  # fmt: skip
        nodes = tuple(
            BackwardNode( f"{name}Backward", needs, Linear(self.call_seconds, seconds), Linear(0,
            out), Linear(0, out + into), Linear(0, into), module, ) for name, needs, seconds, out,
            into, module in reversed(self.tape)
        )  # fmt: skip
        return Profile(
            values, tuple(self.ops), nodes, self.parameter_bytes, self.parameter_bytes, 0, 2 *
            self.parameter_bytes, batch_bytes=Linear(0, 2048), batch_size=batch_size,
            overhead_seconds=1e-3, optimizer_seconds=1e-3,
        )  # fmt: skip


def transformer(
    layers: int, *, width: int = 256, tokens: int = 256, heads: int = 4, dropout: bool = True
) -> Profile:
    """A GPT: what eager torch runs and saves on a CPU for each block."""
    b = Builder()
    stream = tokens * width * 4.0
    b.module = "embed"
    (x,) = b.op("embedding", [b.parameter(1000 * width * 4)], [stream], saves=[])
    drop = b.dropout if dropout else (lambda v: v)
    x = drop(x)
    for layer in range(layers):
        b.module = f"h.{layer}.attn"
        y = b.norm(x)
        qkv = b.linear(y, tokens, width, 3 * width)
        q, k, v = (b.op("clone", [qkv], [stream])[0] for _ in range(3))
        flops = 4.0 * tokens * tokens * width
        out, _ = b.op(
            "sdpa",
            [q, k, v],
            [stream, tokens * heads * 4.0],
            flops=flops,
            saves=[q, k, v],
            save_outputs=(0, 1),
        )
        (out,) = b.op("clone", [out], [stream])
        (x,) = b.op("add", [x, drop(b.linear(out, tokens, width, width))], [stream])
        b.module = f"h.{layer}.mlp"
        y = b.linear(b.norm(x), tokens, width, 4 * width)
        (y,) = b.op("gelu", [y], [4 * stream], saves=[y])
        (x,) = b.op("add", [x, drop(b.linear(y, tokens, 4 * width, width))], [stream])
    b.module = "head"
    logits = b.linear(b.norm(x), tokens, width, 1000)
    (probabilities,) = b.op("log_softmax", [logits], [tokens * 4000.0], save_outputs=(0,))
    b.op("nll_loss", [probabilities], [4.0], saves=[])
    return b.profile()


def resnet(blocks: int, *, channels: int = 64, pixels: int = 1024) -> Profile:
    """Convolutions, batch norms, in-place ReLUs and residual sums; every fourth block halves the
    picture.
    """
    b = Builder()
    b.module = "stem"
    (x,) = b.op(
        "conv",
        [b.parameter(27 * channels * 4)],
        [pixels * channels * 4.0],
        flops=54.0 * channels * pixels,
    )

    def conv_norm(v: int, size: float) -> int:
        weight = b.parameter(9 * channels * channels * 4)
        (v,) = b.op(
            "conv", [v, weight], [size], flops=18.0 * channels * size / 4, saves=[v, weight]
        )
        out, _, _ = b.op("native_batch_norm", [v], [size, 1.0, 1.0], saves=[v], save_outputs=(1, 2))
        return out

    for block in range(blocks):
        b.module = f"layer.{block}"
        size = b.sizes[x]
        y = conv_norm(x, size)
        (y,) = b.op("relu_", [y], [], inplace=y, save_outputs=(0,))
        y = conv_norm(y, size)
        (y,) = b.op("add_", [y, x], [], inplace=y)
        (x,) = b.op("relu_", [y], [], inplace=y, save_outputs=(0,))
        if block % 4 == 3:
            (x,) = b.op("max_pool", [x], [size / 4], saves=[x])
    b.module = "head"
    (x,) = b.op("mean", [x], [channels * 4.0])
    b.linear(x, 1, channels, 1000)
    return b.profile()


def bottlenecks(blocks: int) -> Profile:
    """Blocks of three convolutions with a ReLU after the residual sum, as ResNet-50 has them. The
    first activation is held by a variable for the whole forward.
    """
    b = Builder()
    size = 65536.0
    (x,) = b.op("conv", [b.parameter(4096)], [size], flops=1e6)
    first = x
    for _ in range(blocks):
        y = x
        for width in (size / 4, size / 4, size):
            (y,) = b.op(
                "conv", [y, b.parameter(4096)], [width], flops=1e8 * width / size, saves=[y]
            )
            (y, _, _) = b.op(
                "native_batch_norm", [y], [width, 1.0, 1.0], saves=[y], save_outputs=(1, 2)
            )
            if width < size:
                (y,) = b.op("relu_", [y], [], inplace=y, save_outputs=(0,))
        (y,) = b.op("add", [y, x], [size])
        (x,) = b.op("relu", [y], [size], save_outputs=(0,))
    b.op("mean", [x], [64.0])
    profile = b.profile()
    values = list(profile.values)
    values[first] = replace(values[first], dies=len(profile.operations) - 1)
    return replace(profile, values=tuple(values))
