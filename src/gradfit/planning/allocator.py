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
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

MIB = 1 << 20
SEGMENT_BYTES = 2 * MIB  # every segment is this, or several times as large
_ROUND = 512
_SMALL = MIB  # the largest request of the small pool
_SMALL_SEGMENT, _LARGE_SEGMENT = SEGMENT_BYTES, 20 * MIB
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

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.size

    @property
    def is_whole_segment(self) -> bool:
        return self.previous is None and self.next is None

    def split(self, size: int) -> MemoryBlock:
        """Cut off all but the first bytes; gives the rest."""
        rest = MemoryBlock(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def joins(self, other: MemoryBlock) -> bool:
        """Whether it becomes one with a free neighbour."""
        return self.free and self.mapped == other.mapped

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
        # Addresses that no segment has. They matter: of equal free blocks the lowest is taken.
        self._holes: list[tuple[int, int]] = [(0, 1 << 62)]

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
        for block in (*self._large.blocks(), *self._small.blocks()):
            if block.is_whole_segment:
                block.pool.remove(block)
                self.reserved_bytes -= block.size
                self._return_addresses(block.address, block.size)

    def load(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Begin where a device's allocator is, by its own snapshot (`torch.cuda.memory_snapshot`).

        Args:
            segments: one entry for each, with "address", "total_size", "segment_type" and the
                "blocks" in it, with "size" and "state".
        """
        for segment in _by_address(segments):
            self._take_addresses(segment["total_size"], at=segment["address"])
            self._count(segment["total_size"])
            self._load_blocks(self._pool_of(segment), segment, None)

    def _pool_of(self, segment: Mapping[str, Any]) -> Pool:
        return self._small if segment["segment_type"] == "small" else self._large

    def _load_blocks(
        self, pool: Pool, segment: Mapping[str, Any], previous: MemoryBlock | None
    ) -> MemoryBlock | None:
        """Take over a segment's blocks, each behind the one before it; gives the last."""
        address = segment["address"]
        for one in segment["blocks"]:
            block = MemoryBlock(pool, address, one["size"])
            _append(previous, block)
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
        nbytes = _segment_bytes(pool, size)
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
        if before is not None and before.joins(block):
            self._drop(before)
            before.absorb_next()
            block = before
        if after is not None and after.joins(block):
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
                self._holes[place : place + 1] = filter(_has_room, left)
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


def _by_address(segments: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(segments, key=lambda one: one["address"])


def _append(previous: MemoryBlock | None, block: MemoryBlock) -> None:
    """Make a block the neighbour of the one before it, if there is one."""
    block.previous = previous
    if previous is not None:
        previous.next = block


def _segment_bytes(pool: Pool, size: int) -> int:
    """What is reserved for a request that no free block can serve (rule 3)."""
    if pool.small:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _SEGMENT_OF_ITS_OWN else _up(size, _SEGMENT_ROUND)


def _has_room(hole: tuple[int, int]) -> bool:
    return hole[0] < hole[1]


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
        for block in (*self._large.blocks(), *self._small.blocks()):
            self._unmap(block)

    def load(self, segments: Iterable[Mapping[str, Any]]) -> None:
        by_address = _by_address(segments)
        for pool in (self._small, self._large):
            self._load_range(pool, [one for one in by_address if self._pool_of(one) is pool])

    def _load_range(self, pool: Pool, segments: Sequence[Mapping[str, Any]]) -> None:
        """Take over a pool's range: its segments, what is not mapped between them, and all
        addresses behind.
        """
        last: MemoryBlock | None = None
        for segment in segments:
            last = _up_to(segment["address"], last)
            self._count(segment["total_size"])
            last = self._load_blocks(pool, segment, last)
        if last is not None:
            self._first[pool.small] = _first_of_range(last)
            _append(last, MemoryBlock(pool, last.end, 1 << 62, mapped=False))

    def _find(self, pool: Pool, size: int) -> MemoryBlock | None:
        """At the end of what is mapped, a block counts with what it can grow to: others come
        first.
        """
        best: MemoryBlock | None = None
        for block in pool.at_least(size):
            if best is not None and _grown(block) >= _grown(best):
                break
            best = block
        if best is not None:
            pool.remove(best)
        return best

    def _reserve(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Put memory behind the first free addresses that are enough, in whole pages."""
        place = self._place(pool, size)
        block = place if place.mapped else self._map(place, min(place.size, size))
        while block is not None and block.size < size:
            assert block.next is not None
            block = self._map(block.next, min(size - block.size, block.next.size))
        if block is not None:
            pool.remove(block)
        return block

    def _place(self, pool: Pool, size: int) -> MemoryBlock:
        """Where the first free addresses begin that are enough, mapped ones before them
        included.
        """
        if pool.small not in self._first:
            self._first[pool.small] = MemoryBlock(pool, 0, 1 << 62, mapped=False)
        for block in _unmapped_from(self._first[pool.small]):
            begin = _with_free_before(block)
            if _room(begin, size) >= size:
                return begin
        raise AssertionError("the last block of a range has no end")

    def _map(self, block: MemoryBlock, size: int) -> MemoryBlock | None:
        nbytes = min(_up(size, _page(block.pool)), block.size)
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
        start, end = self._whole_pages(block)
        if end <= start:
            return
        block.pool.remove(block)
        if start > block.address:
            rest = block.split(start - block.address)
            block.pool.add(block)
            block = rest
        if end < block.end:
            block.pool.add(block.split(end - block.address))
        block.mapped = False
        self.reserved_bytes -= block.size
        self._join(block)

    def _whole_pages(self, block: MemoryBlock) -> tuple[int, int]:
        """Where the pages begin and end that lie in a block as a whole."""
        page, base = _page(block.pool), self._first[block.pool.small].address
        return base + _up(block.address - base, page), base + (block.end - base) // page * page

    def _is_split(self, block: MemoryBlock, rest: int) -> bool:
        return rest >= _ROUND


def _up_to(address: int, last: MemoryBlock | None) -> MemoryBlock | None:
    """The last block of a range that reaches this address: if there is a gap before it, that."""
    if last is None or last.end >= address:
        return last
    gap = MemoryBlock(last.pool, last.end, address - last.end, mapped=False)
    _append(last, gap)
    return gap


def _first_of_range(block: MemoryBlock) -> MemoryBlock:
    while block.previous is not None:
        block = block.previous
    return block


def _unmapped_from(block: MemoryBlock | None) -> Iterator[MemoryBlock]:
    while block is not None:
        if not block.mapped:
            yield block
        block = block.next


def _with_free_before(block: MemoryBlock) -> MemoryBlock:
    before = block.previous
    return before if before is not None and before.free else block


def _page(pool: Pool) -> int:
    return _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT


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
        return all(self._follow(name, nbytes, device) for name, nbytes, device in events)

    def _follow(self, name: int, nbytes: int, device: int) -> bool:
        if nbytes < 0:
            self._free(name)
        elif nbytes > 0 and device in self._devices:
            return self._allocate(name, nbytes, self._devices[device])
        return True

    def _allocate(self, name: int, nbytes: int, allocator: CachingAllocator) -> bool:
        block = allocator.allocate(nbytes)
        if block is not None:
            self._held[name] = allocator, block
        return block is not None

    def _free(self, name: int) -> None:
        allocator_and_block = self._held.pop(name, None)
        if allocator_and_block is not None:
            allocator_and_block[0].free(allocator_and_block[1])

    def free(self, keep: Container[int] = ()) -> None:
        """Free all that is held, but for these names."""
        for name in [name for name in self._held if name not in keep]:
            self._free(name)
