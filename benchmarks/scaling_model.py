"""A model on paper: communication and memory per window for 8 to 4096 devices, for DDP and FSDP2.

Nothing here was measured. The assumptions are the constants below, printed with the table:

* A ring moves 2·(n−1)/n of the gradients for an all-reduce, (n−1)/n for a reduce-scatter or an
  all-gather, at the slowest link's bandwidth: the node's inside a node, the network's beyond it.
  Each collective also waits for log₂ n hops.
* Communication inside a backward is hidden behind it as far as it is shorter (overlap 1) or not at
  all (overlap 0). gradfit reduces after the last backward, so that ranks may hold different numbers
  of micro-batches: its reduction is never hidden. Plain DDP's is, behind one backward of the
  window.
* The meeting is one all-gather of 512 bytes per rank; FSDP2's announcements are one of 4 bytes per
  gather.

    python benchmarks/scaling_model.py
"""

from __future__ import annotations

import math

PARAMETERS = 7e9
UNITS = 32
MICRO_BATCHES = 8
TOKENS = 8192  # per device and micro-batch
FLOPS = 400e12  # that a device really does per second
# per parameter: float32 sums, bfloat16 weights, Adam + master
GRADIENT_BYTES, WEIGHT_BYTES, OPTIMIZER_BYTES = 4, 2, 12
NODE, NODE_BANDWIDTH, NETWORK_BANDWIDTH = 8, 300e9, 45e9  # devices, bytes per second and device
HOP_SECONDS = 8e-6
MEETING_BYTES, ANNOUNCEMENT_BYTES = 512, 4
GIB = 2**30


def ring_seconds(nbytes: float, devices: int, rounds: int) -> float:
    """`rounds` is 2 for an all-reduce, 1 for half of one."""
    bandwidth = NODE_BANDWIDTH if devices <= NODE else NETWORK_BANDWIDTH
    return rounds * (
        (devices - 1) / devices * nbytes / bandwidth + math.log2(devices) * HOP_SECONDS
    )


def row(devices: int) -> str:
    forward = 2 * PARAMETERS * TOKENS / FLOPS
    compute = MICRO_BATCHES * 3 * forward
    meeting = ring_seconds(MEETING_BYTES * devices, devices, 1)
    reduce_all = ring_seconds(GRADIENT_BYTES * PARAMETERS, devices, 2)
    ddp = compute + meeting + reduce_all
    plain_ddp = compute + max(0.0, reduce_all - 2 * forward)
    each_time = compute + MICRO_BATCHES * max(0.0, reduce_all - 2 * forward)
    gather = ring_seconds(WEIGHT_BYTES * PARAMETERS, devices, 1)
    scatter = ring_seconds(GRADIENT_BYTES * PARAMETERS, devices, 1)
    words = 2 * UNITS * ring_seconds(ANNOUNCEMENT_BYTES * devices, devices, 1)
    passes = MICRO_BATCHES * (
        max(forward, gather + words / 2) + max(2 * forward, gather + words / 2)
    )
    fsdp = passes + meeting + scatter
    fsdp_each = MICRO_BATCHES * (max(forward, gather) + max(2 * forward, gather + scatter))
    # DDP's own buckets included
    replicated = PARAMETERS * (WEIGHT_BYTES + 2 * GRADIENT_BYTES + OPTIMIZER_BYTES)
    unit = PARAMETERS / UNITS
    sharded = PARAMETERS * (
        (WEIGHT_BYTES + OPTIMIZER_BYTES + GRADIENT_BYTES) / devices + GRADIENT_BYTES
    )
    sharded += unit * (2 * WEIGHT_BYTES + 2 * GRADIENT_BYTES)
    return (
        f"| {devices} | {meeting * 1e3:.2f} | {reduce_all:.2f} | {ddp / plain_ddp:.3f} |"
        f" {ddp / each_time:.3f} | {replicated / GIB:.0f} | {scatter:.2f} | {fsdp / fsdp_each:.3f}"
        f" | {sharded / GIB:.0f} |"
    )


def main() -> None:
    print(
        f"{PARAMETERS / 1e9:.0f} G parameters, {MICRO_BATCHES} micro-batches of {TOKENS} tokens per"
        f" device, {FLOPS / 1e12:.0f} TFLOP/s;\n{NODE} devices per node at"
        f" {NODE_BANDWIDTH / 1e9:.0f} GB/s, network at {NETWORK_BANDWIDTH / 1e9:.0f} GB/s per"
        f" device, {HOP_SECONDS * 1e6:.0f} µs per hop\n"
    )
    print(
        "| devices | meeting, ms | all-reduce, s | window: gradfit / DDP `no_sync` | … / DDP every"
        " micro-batch | DDP, GiB | reduce-scatter, s | window: gradfit / FSDP2 every micro-batch |"
        " FSDP2, GiB |"
    )
    print("| --- " * 9 + "|")
    for exponent in range(3, 13):
        print(row(2**exponent))


if __name__ == "__main__":
    main()
