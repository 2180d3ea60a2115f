"""What a device reserves for a sequence of allocations: the caching allocator, followed on paper.

Torch's allocator for CUDA takes memory from the driver in segments and hands out parts of them. A
process is charged for the segments, so a budget on a device is about these, not about the bytes of
tensors. The rules (c10/cuda/CUDACachingAllocator.cpp, torch 2.13, for one stream):

1. A request is rounded up to 512 bytes. Up to 1 MiB it is served by the small pool, else by the
   large one.
2. The smallest free block of the pool that is large enough is taken, of equal ones that with the
   lowest address. What is left over of it stays free: of a small block from 512 bytes, of a large
   one from more than 1 MiB.
3. If there is none, a segment is reserved: 2 MiB for the small pool; for the large one 20 MiB, or
   from 10 MiB the request rounded up to 2 MiB.
4. A block that is freed joins its free neighbours. Its segment stays reserved.
5. Where a segment would pass the cap, all segments that are free as a whole are given back, and it
   is tried once more.

With expandable segments (`expandable_segments:True`) each pool has one range of addresses, and
memory is put behind it page by page, of 2 and 20 MiB, where it is needed (`ExpandableAllocator`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

MIB = 1 << 20
_ROUND = 512
_SMALL = MIB  # the largest request of the small pool
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB
_SEGMENT_OF_ITS_OWN = 10 * MIB  # from this size on a request gets a segment of its size
_SEGMENT_ROUND = 2 * MIB


def rounded(nbytes: int) -> int:
    """What a request takes of a block (rule 1).

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)
    """
    return max(_ROUND, _up(nbytes, _ROUND))


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


class MemoryBlock:
    """A part of a segment; its neighbours are those of the same segment."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.free, self.mapped = True, mapped
        self.previous: MemoryBlock | None = None
        self.next: MemoryBlock | None = None

    def split(self, size: int) -> MemoryBlock:
        """Cut off all but the first bytes; gives the rest."""
        rest = MemoryBlock(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """The next block becomes part of this one."""
        other = self.next
        assert other is not None
        self.size += other.size
        self.next = other.next
        if self.next is not None:
            self.next.previous = self


class Pool:
    """The free blocks of one kind, by size and address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._order: list[tuple[int, int]] = []
        self._blocks: dict[int, MemoryBlock] = {}

    def add(self, block: MemoryBlock) -> None:
        insort(self._order, (block.size, block.address))
        self._blocks[block.address] = block

    def remove(self, block: MemoryBlock) -> None:
        del self._order[bisect_left(self._order, (block.size, block.address))]
        del self._blocks[block.address]

    def at_least(self, size: int) -> Iterable[MemoryBlock]:
        """Free blocks that are large enough, smallest first."""
        for place in range(bisect_left(self._order, (size, -1)), len(self._order)):
            yield self._blocks[self._order[place][1]]

    def blocks(self) -> list[MemoryBlock]:
        return [self._blocks[address] for _, address in self._order]


class CachingAllocator:
    """The allocator of one device and one stream. Counts what is reserved, now and at the peak.

    Args:
        cap_bytes: the most it may reserve; None: as much as it likes.

    >>> device = CachingAllocator()
    >>> first = device.allocate(3 * MIB)
    >>> device.allocated_bytes // MIB, device.reserved_bytes // MIB
    (3, 20)
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        self.cap_bytes = cap_bytes
        self.reserved_bytes = self.peak_reserved_bytes = self.allocated_bytes = 0
        self.retries = 0  # how often cached segments had to be given back first
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._holes: list[tuple[int, int]] = [(0, 1 << 62)]  # addresses that no segment has

    def allocate(self, nbytes: int) -> MemoryBlock | None:
        """Serve a request; None if there is no memory for it below the cap."""
        size = rounded(nbytes)
        pool = self._small if size <= _SMALL else self._large
        block = self._find(pool, size) or self._reserve(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._reserve(pool, size)
        return None if block is None else self._hand_out(block, size)

    def free(self, block: MemoryBlock) -> None:
        """Take back what `allocate` gave (rule 4)."""
        self.allocated_bytes -= block.size
        block.free = True
        self._join(block)

    def empty_cache(self) -> None:
        """Give back all segments that are free as a whole."""
        for pool in (self._large, self._small):
            for block in pool.blocks():
                if block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size
                    self._return_addresses(block.address, block.size)

    def load(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Begin where a device's allocator is, by its own snapshot (`torch.cuda.memory_snapshot`).

        Args:
            segments: one entry for each, with "address", "total_size", "segment_type" and the
                "blocks" in it, with "size" and "state".
        """
        for segment in sorted(segments, key=lambda one: one["address"]):
            pool = self._small if segment["segment_type"] == "small" else self._large
            self._take_addresses(segment["total_size"], at=segment["address"])
            self._count(segment["total_size"])
            self._load_blocks(pool, segment["address"], segment["blocks"], None)

    def _load_blocks(
        self,
        pool: Pool,
        address: int,
        blocks: Sequence[Mapping[str, Any]],
        previous: MemoryBlock | None,
    ) -> MemoryBlock | None:
        for one in blocks:
            block = MemoryBlock(pool, address, one["size"])
            block.previous = previous
            if previous is not None:
                previous.next = block
            block.free = one["state"] == "inactive"
            if block.free:
                pool.add(block)
            else:
                self.allocated_bytes += block.size
            address, previous = address + block.size, block
        return previous

    def _find(self, pool: Pool, size: int) -> MemoryBlock | None:
        block = next(iter(pool.at_least(size)), None)
        if block is not None:
            pool.remove(block)
        return block

    def _reserve(self, pool: Pool, size: int) -> MemoryBlock | None:
        """A new segment, free as a whole (rule 3)."""
        if pool.small:
            nbytes = _SMALL_SEGMENT
        elif size < _SEGMENT_OF_ITS_OWN:
            nbytes = _LARGE_SEGMENT
        else:
            nbytes = _up(size, _SEGMENT_ROUND)
        if not self._is_within_cap(nbytes):
            return None
        self._count(nbytes)
        return MemoryBlock(pool, self._take_addresses(nbytes), nbytes)

    def _hand_out(self, block: MemoryBlock, size: int) -> MemoryBlock:
        rest = block.size - size
        if self._is_split(block, rest):
            block.pool.add(block.split(size))
        block.free = False
        self.allocated_bytes += block.size
        return block

    def _is_split(self, block: MemoryBlock, rest: int) -> bool:
        return rest >= _ROUND if block.pool.small else rest > _SMALL

    def _join(self, block: MemoryBlock) -> None:
        """Put a block that has become free among the free ones, joined with its neighbours."""
        before, after = block.previous, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            self._drop(before)
            before.absorb_next()
            block = before
        if after is not None and after.free and after.mapped == block.mapped:
            self._drop(after)
            block.absorb_next()
        if block.mapped:
            block.pool.add(block)

    def _drop(self, block: MemoryBlock) -> None:
        if block.mapped:
            block.pool.remove(block)

    def _is_within_cap(self, more: int) -> bool:
        return self.cap_bytes is None or self.reserved_bytes + more <= self.cap_bytes

    def _count(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _take_addresses(self, nbytes: int, at: int | None = None) -> int:
        """The first hole that is large enough, or the one around `at`."""
        for place, (start, end) in enumerate(self._holes):
            begin = start if at is None else at
            if start <= begin and begin + nbytes <= end:
                left = [(start, begin), (begin + nbytes, end)]
                self._holes[place : place + 1] = [hole for hole in left if hole[0] < hole[1]]
                return begin
        raise ValueError(f"The addresses from {at} on belong to another segment already.")

    def _return_addresses(self, address: int, nbytes: int) -> None:
        insort(self._holes, (address, address + nbytes))
        joined: list[tuple[int, int]] = []
        for start, end in self._holes:
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self._holes = joined


class ExpandableAllocator(CachingAllocator):
    """The same with expandable segments: each pool is one range that grows where it is used.

    Args:
        cap_bytes: the most it may reserve; None: as much as it likes.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        super().__init__(cap_bytes)
        self._first: dict[bool, MemoryBlock] = {}  # of each pool: where its range begins

    def empty_cache(self) -> None:
        """Take the memory away behind the whole pages of free blocks."""
        for pool in (self._large, self._small):
            for block in pool.blocks():
                self._unmap(block)

    def load(self, segments: Iterable[Mapping[str, Any]]) -> None:
        for small in (True, False):
            pool = self._small if small else self._large
            own = [one for one in segments if (one["segment_type"] == "small") == small]
            end: int | None = None
            last: MemoryBlock | None = None
            for segment in sorted(own, key=lambda one: one["address"]):
                if end is not None and segment["address"] > end:
                    gap = MemoryBlock(pool, end, segment["address"] - end, mapped=False)
                    gap.previous = last
                    assert last is not None
                    last.next = last = gap
                self._count(segment["total_size"])
                first = last is None
                before = last
                last = self._load_blocks(pool, segment["address"], segment["blocks"], before)
                end = segment["address"] + segment["total_size"]
                if first and last is not None:
                    begin = last
                    while begin.previous is not None:
                        begin = begin.previous
                    self._first[small] = begin
            if last is not None and end is not None:
                rest = MemoryBlock(pool, end, 1 << 62, mapped=False)
                rest.previous, last.next = last, rest

    def _find(self, pool: Pool, size: int) -> MemoryBlock | None:
        """At the end of what is mapped, a block counts with what it can grow to: others come
        first.
        """
        found: MemoryBlock | None = None
        for block in pool.at_least(size):
            if found is not None and _grown(block) >= _grown(found):
                break
            found = block
        if found is not None:
            pool.remove(found)
        return found

    def _reserve(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Put memory behind the first free addresses that are enough, in whole pages."""
        block = self._place(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.next is not None
            mapped = self._map(block.next, min(size - block.size, block.next.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _place(self, pool: Pool, size: int) -> MemoryBlock:
        if pool.small not in self._first:
            self._first[pool.small] = MemoryBlock(pool, 0, 1 << 62, mapped=False)
        block: MemoryBlock | None = self._first[pool.small]
        while block is not None:
            if not block.mapped:
                begin = block
                if block.previous is not None and block.previous.free:
                    begin = block.previous
                if _room(begin, size) >= size:
                    return begin
            block = block.next
        raise AssertionError("the last block of a range has no end")

    def _map(self, block: MemoryBlock, size: int) -> MemoryBlock | None:
        page = _SMALL_SEGMENT if block.pool.small else _LARGE_SEGMENT
        nbytes = min(_up(size, page), block.size)
        if not self._is_within_cap(nbytes):
            return None
        if nbytes < block.size:
            block.split(nbytes)
        self._count(nbytes)
        block.mapped = True
        before = block.previous
        self._join(block)
        return before if before is not None and before.next is not block else block

    def _unmap(self, block: MemoryBlock) -> None:
        page = _SMALL_SEGMENT if block.pool.small else _LARGE_SEGMENT
        base = self._first[block.pool.small].address
        start = base + _up(block.address - base, page)
        end = base + (block.address + block.size - base) // page * page
        if end <= start:
            return
        block.pool.remove(block)
        if start > block.address:
            rest = block.split(start - block.address)
            block.pool.add(block)
            block = rest
        if end < block.address + block.size:
            block.pool.add(block.split(end - block.address))
        block.mapped = False
        self.reserved_bytes -= block.size
        self._join(block)

    def _is_split(self, block: MemoryBlock, rest: int) -> bool:
        return rest >= _ROUND


def _grown(block: MemoryBlock) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _room(block: MemoryBlock | None, enough: int) -> int:
    room = 0
    while block is not None and block.free and room < enough:
        room += block.size
        block = block.next
    return room


class AllOnPaper:
    """The allocators of all devices, which run a sequence of allocations.

    Args:
        devices: each device's allocator, by its index.
    """

    def __init__(self, devices: Mapping[int, CachingAllocator]) -> None:
        self._devices = devices
        self._held: dict[int, tuple[CachingAllocator, MemoryBlock]] = {}

    @property
    def peak_reserved_bytes(self) -> int:
        """Of all devices together."""
        return sum(one.peak_reserved_bytes for one in self._devices.values())

    def follow(self, events: Iterable[tuple[int, int, int]]) -> bool:
        """Go on with these; whether there was memory for all of them.

        Args:
            events: (name, bytes, device) where something is allocated; (name, -1, -1) where it is
                freed. What is freed and was not allocated here was there before, and stays.
        """
        for name, nbytes, device in events:
            if nbytes < 0:
                allocator_and_block = self._held.pop(name, None)
                if allocator_and_block is not None:
                    allocator_and_block[0].free(allocator_and_block[1])
            elif nbytes > 0 and device in self._devices:
                allocator = self._devices[device]
                block = allocator.allocate(nbytes)
                if block is None:
                    return False
                self._held[name] = allocator, block
        return True

    def free(self, keep: Container[int] = ()) -> None:
        """Free all that is held, but for these names."""
        for name in [name for name in self._held if name not in keep]:
            allocator, block = self._held.pop(name)
            allocator.free(block)
