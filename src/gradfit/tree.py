"""Batches as nests of tensors: how many rows, how to cut them along dim 0, how to join what comes
out.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gradfit.errors import MisuseError

_UNCUT = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Something in a batch that every part gets as it is."""

    content: Any


def whole(content: Any) -> Whole:
    """Mark an entry of a batch that goes to every part uncut: `loss_fn` is given `content` itself.

    Args:
        content: anything: a table that all rows use, a list of names, a size.

    >>> batch = {"x": torch.arange(3), "names": whole(["a", "b"])}
    >>> [unmarked(part)["names"] for part in split_batch(batch, 2)]
    [['a', 'b'], ['a', 'b']]
    """
    return Whole(content)


# what is most common and holds nothing
_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})
_TENSORS = frozenset({torch.Tensor})
_PLAIN = _ATOMS | _TENSORS
_dimensions_of, _shape_of, _layout_of = map(operator.attrgetter, ("ndim", "shape", "layout"))


def leaves(nest: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nest, in a fixed order."""
    if isinstance(nest, torch.Tensor):
        return iter((nest,))
    held = _plain_tensors(nest)
    return iter(_leaves_inside(nest) if held is None else held)


def _leaves_inside(nest: Any) -> list[torch.Tensor]:
    """As a list, and not one by one: what asks thousands of tensors for something is then a loop
    that is not Python's.
    """
    tensors: list[torch.Tensor] = []
    walk = _NestWalk(nest)
    for item in walk:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        else:
            inside = _plain_tensors(item)
            if inside is None:
                walk.enter(item)
            else:
                tensors += inside
    return tensors


def leaves_and_lists(nest: Any) -> Iterator[Any]:
    """The tensors of a nest and its outermost lists and tuples that hold some, in a fixed order.

    >>> x, y = torch.zeros(2), torch.zeros(3)
    >>> [type(found).__name__ for found in leaves_and_lists({"x": x, "rows": [{"y": y}], "n": [1]})]
    ['Tensor', 'list']
    """
    walk = _NestWalk(nest)
    for item in walk:
        if isinstance(item, torch.Tensor):
            yield item
        elif type(item) not in (list, tuple):
            walk.enter(item)
        elif next(leaves(item), None) is not None:
            yield item


def _plain_tensors(nest: Any) -> Sequence[torch.Tensor] | None:
    """The tensors of a list, tuple or dict that holds nothing but plain tensors, numbers and
    strings; None of anything else. Of what such a nest holds, nothing is asked one by one: a batch
    may have thousands.
    """
    if type(nest) is dict:
        items: Collection[Any] = nest.values()
    elif isinstance(nest, list | tuple):
        items = nest
    else:
        return None
    kinds = set(map(type, items))
    if kinds <= _ATOMS:
        return ()
    if kinds <= _TENSORS:
        return [*items]
    return [item for item in items if type(item) is torch.Tensor] if kinds <= _PLAIN else None


class _NestWalk:
    """A walk over a nest in order, without recursion: iterate, and `enter` what to look into."""

    def __init__(self, nest: Any) -> None:
        self._open: list[tuple[Any, Iterator[Any]]] = [(None, iter((nest,)))]
        self._inside: set[int] = set()

    def __iter__(self) -> Iterator[Any]:
        while self._open:
            nest, items = self._open[-1]
            depth = len(self._open)
            for item in items:
                yield item
                if len(self._open) > depth:
                    break
            else:
                self._open.pop()
                self._inside.discard(id(nest))

    def enter(self, nest: Any) -> bool:
        """Go on with what this holds; False if it holds nothing."""
        items = None if type(nest) in _ATOMS else _items(nest)
        if not items:
            return False
        if id(nest) in self._inside:
            raise MisuseError(
                f"The batch holds a {type(nest).__name__} that holds itself. Pass a batch without"
                " circles."
            )
        self._inside.add(id(nest))
        self._open.append((nest, iter(items)))
        return True

    def note_holders(self, holders: dict[int, Any]) -> None:
        """Add, by address, everything that the walk is in: from the innermost, up to one that is
        there already.
        """
        for depth in range(len(self._open) - 1, 0, -1):
            nest = self._open[depth][0]
            if id(nest) in holders:
                break
            holders[id(nest)] = nest


def _items(nest: Any) -> Collection[Any] | None:
    """What a nest holds, in order; None or nothing for what is no nest, or has neither tensors nor
    nests in it.
    """
    if isinstance(nest, Mapping):
        return nest.values()
    if isinstance(nest, list | tuple):
        return None if _ATOMS.issuperset(map(type, nest)) else nest
    if isinstance(nest, Whole):
        return (nest.content,)
    return [getattr(nest, name) for name in _fields_of(nest)]


class _Entry(NamedTuple):
    """Something in a batch that has rows."""

    place: _Place
    rows: int
    layout: torch.layout | None = None  # of a tensor

    @property
    def is_tensor(self) -> bool:
        return self.layout is not None


class _Place(NamedTuple):
    """Where in a batch something is: what it is in, and by which key. It is spelt out only where it
    is said.
    """

    around: _Place | None
    key: str | int | None
    is_field: bool = False

    def inside(self, key: str | int | None, is_field: bool) -> _Place:
        return _Place(self, key, is_field)

    def __str__(self) -> str:
        keys, place = [], self
        while place.around is not None:
            keys.append(f".{place.key}" if place.is_field else f"[{place.key!r}]")
            place = place.around
        return "".join(reversed(keys)) or "it"


def size_of_batch(batch: Any, name: str = "The batch") -> int:
    """The rows of a batch: the size of dim 0, on which all its tensors and lists must agree.

    >>> size_of_batch({"x": torch.zeros(6, 2), "text": ["a", "b", "c", "d", "e", "f"]})
    6
    """
    if _is_plain_tensor(batch):
        return len(batch)
    held = _plain_tensors(batch)
    rows = _rows_of_tensors(held) if held else None
    return _size_of(batch, _holders(batch), name) if rows is None else rows


def size_as_cut(part: Any) -> int:
    """The rows of what was cut from a batch, by its first tensor: that all agree on them was seen
    before it was cut.

    >>> size_as_cut({"names": ["a", "b"], "x": torch.zeros(2, 3), "table": whole(torch.zeros(5))})
    2
    """
    walk = _NestWalk(part)
    for item in walk:
        if isinstance(item, torch.Tensor):
            if item.ndim:
                return item.shape[0]
        elif not isinstance(item, Whole):
            walk.enter(item)
    return size_of_batch(part)


def _rows_of_tensors(tensors: Sequence[torch.Tensor]) -> int | None:
    """The rows on which all of them agree that have any; None if they do not, or one cannot be
    cut.
    """
    if set(map(_layout_of, tensors)) != {torch.strided}:
        return None
    rows = {shape[0] for shape in set(map(_shape_of, tensors)) if shape}
    return rows.pop() if len(rows) == 1 else None


def _is_plain_tensor(batch: Any) -> bool:
    """Whether it is one tensor with rows, of which nothing more need be asked."""
    return type(batch) is torch.Tensor and batch.ndim > 0 and batch.layout is torch.strided


def _size_of(batch: Any, holders: Mapping[int, Any], name: str = "The batch") -> int:
    rows = _common_rows(batch, holders)
    return _size_by_entries(batch, holders, name) if rows is None else rows


def _common_rows(batch: Any, holders: Mapping[int, Any]) -> int | None:
    """The rows on which all that has rows agrees; None if it does not, or something cannot be cut:
    what is wrong, and where, is then looked for entry by entry.
    """
    sizes: set[int] = set()
    tensors: list[torch.Tensor] = []
    left = [batch]
    while left:
        nest = left.pop()
        if isinstance(nest, torch.Tensor):
            tensors.append(nest)
        elif type(nest) in _ATOMS or isinstance(nest, Whole):
            pass
        elif isinstance(nest, np.ndarray):
            sizes |= {*nest.shape[:1]}
        elif inside := _plain_tensors(nest):
            tensors += inside
        elif _is_row_list(nest, holders):
            sizes.add(len(nest))
        else:
            left += [item for _, item, _ in _named_items(nest)]
    rows = _rows_of_tensors(tensors)
    return rows if sizes <= {rows} else None


def _size_by_entries(batch: Any, holders: Mapping[int, Any], name: str) -> int:
    entries = _entries(batch, holders)
    _check_layouts(entries, name)
    tensors = [entry for entry in entries if entry.is_tensor]
    if not tensors:
        raise MisuseError(
            f"{name} cannot be split: it has no tensor with a dim 0. Pass split=, a function"
            " (batch, size) -> parts."
        )
    for entry in (*tensors, *entries):
        if entry.rows != tensors[0].rows:
            raise _differs(entry, tensors[0], batch, holders, name)
    return tensors[0].rows


def _check_layouts(entries: Sequence[_Entry], name: str) -> None:
    sparse = next((entry.layout for entry in entries if entry.layout in _UNCUT), None)
    if sparse is not None:
        raise MisuseError(
            f"{name} cannot be split: it has a {sparse} tensor. Pass split=, a function (batch,"
            " size) -> parts."
        )


def _differs(
    entry: _Entry, first: _Entry, batch: Any, holders: Mapping[int, Any], name: str
) -> MisuseError:
    in_lists = _rows_in_lists(batch, holders)
    if in_lists is not None:
        return MisuseError(f"{name} cannot be split: {in_lists.text}. {SPLIT_LISTS}.")
    what = f"size {entry.rows} along dim 0" if entry.is_tensor else f"length {entry.rows}"
    return MisuseError(
        f"{name} cannot be split: {entry.place} has {what}, {first.place} has {first.rows}"
        f" rows. Pass gf.whole(…) as {entry.place} if every part is to get all of it, or"
        " split=, a function (batch, size) -> parts."
    )


def _entries(batch: Any, holders: Mapping[int, Any]) -> list[_Entry]:
    """What has rows, in order: tensors, arrays, and lists that are no containers of tensors."""
    entries: list[_Entry] = []
    for nest, place in _with_places(batch, holders):
        if isinstance(nest, torch.Tensor | np.ndarray):
            if nest.ndim:
                entries.append(_Entry(place, nest.shape[0], getattr(nest, "layout", None)))
        elif _is_row_list(nest, holders):
            entries.append(_Entry(place, len(nest)))
    return entries


def _with_places(
    batch: Any, holders: Mapping[int, Any], open_lists: Collection[int] | None = None
) -> Iterator[tuple[Any, _Place]]:
    """Everything in a batch, in order, each nest before what it holds. Of lists that hold tensors
    only these, by address, are looked into; None: all.
    """
    left: list[tuple[Any, _Place]] = [(batch, _Place(None, None))]
    while left:
        nest, place = left.pop()
        yield nest, place
        is_entry = isinstance(nest, torch.Tensor | np.ndarray | Whole)
        is_closed = open_lists is not None and _is_list(nest) and id(nest) not in open_lists
        if not is_entry and not is_closed and not _is_row_list(nest, holders):
            left += [(item, place.inside(key, of)) for key, item, of in _named_items(nest)][::-1]


class RowsInLists(NamedTuple):
    """Lists in a batch that seem to hold a tensor, or a nest of them, for each row."""

    text: str
    """Which, and why it seems so."""
    rows: int
    addresses: frozenset[int]


SPLIT_LISTS = (
    "Lists that hold tensors are not cut, but each tensor in them: pass split=, a function (batch,"
    " size) -> parts, which cuts such lists, too"
)


def rows_in_lists(batch: Any) -> RowsInLists | None:
    """Lists that hold tensors and have as many items as something beside them has rows, the
    outermost ones; None if there are none.

    >>> rows = [torch.zeros(3), torch.zeros(5)]
    >>> rows_in_lists({"rows": rows, "y": torch.zeros(2)}).text
    "['rows'] is a list of 2 with tensors in it, and ['y'] has 2 rows"
    >>> rows_in_lists({"rows": rows, "y": torch.zeros(3)}) is None
    True
    """
    return _rows_in_lists(batch, _holders(batch))


def _rows_in_lists(batch: Any, holders: Mapping[int, Any]) -> RowsInLists | None:
    opened: set[int] = set()
    while True:
        lists: list[tuple[Any, _Place]] = []
        beside: dict[int, _Place] = {}  # by rows, the first entry that is in no list
        for nest, place in _with_places(batch, holders, opened):
            if isinstance(nest, torch.Tensor | np.ndarray):
                if nest.ndim:
                    beside.setdefault(nest.shape[0], place)
            elif _is_row_list(nest, holders):
                beside.setdefault(len(nest), place)
            elif _is_list(nest) and id(nest) not in opened:
                lists.append((nest, place))
        found = [(nest, place) for nest, place in lists if len(nest) in beside]
        if found:
            return _described_lists(found, beside)
        if not lists:
            return None
        opened.update(id(nest) for nest, _ in lists)


def _described_lists(
    found: Sequence[tuple[Any, _Place]], beside: Mapping[int, _Place]
) -> RowsInLists:
    first, place = found[0]
    rows = len(first)
    return RowsInLists(
        f"{place} is a {type(first).__name__} of {rows} with tensors in it, and {beside[rows]} has"
        f" {rows} rows",
        rows,
        frozenset(id(nest) for nest, _ in found if len(nest) == rows),
    )


def split_with_lists(batch: Any, size: int) -> Iterator[Any]:
    """As `split_batch`, but lists that seem to hold a tensor for each row (`rows_in_lists`) are cut
    as such.

    >>> batch = {"rows": [torch.zeros(3), torch.zeros(5)], "y": torch.arange(2)}
    >>> [(len(part["rows"]), part["y"].tolist()) for part in split_with_lists(batch, 1)]
    [(1, [0]), (1, [1])]
    """
    holders = _holders(batch)
    found = _rows_in_lists(batch, holders)
    if found is None:
        yield from split_batch(batch, size)
        return
    for start in range(0, found.rows, size):
        rows = slice(start, start + size)

        def cut(items: Sequence[Any], rows: slice = rows) -> Any:
            if id(items[0]) in found.addresses:
                return items[0][rows]
            return _replaced(items[0], holders, operator.itemgetter(rows))

        yield _map_many([batch], cut)


def _named_items(nest: Any) -> Iterator[tuple[Any, Any, bool]]:
    """What a nest holds, each with its key or position or the name of its field, and whether it is
    a field.
    """
    if isinstance(nest, Mapping):
        pairs: Iterable[tuple[Any, Any]] = nest.items()
    elif isinstance(nest, list | tuple):
        pairs = enumerate(nest)
    else:
        pairs = ((name, getattr(nest, name)) for name in _fields_of(nest))
    is_field = not isinstance(nest, Mapping | list | tuple)
    for key, item in pairs:
        yield key, item, is_field


def _fields_of(nest: Any) -> list[str]:
    """The names of a dataclass's fields; none for what is no dataclass."""
    if not dataclasses.is_dataclass(nest) or isinstance(nest, type):
        return []
    return [field.name for field in dataclasses.fields(nest)]


def _is_row_list(nest: Any, holders: Mapping[int, Any]) -> bool:
    """A list or tuple with one item a row: one that holds no tensors, arrays or marks."""
    return _is_list(nest) and id(nest) not in holders


def _is_list(nest: Any) -> bool:
    return isinstance(nest, list | tuple) and not hasattr(nest, "_fields")


def _holders(nest: Any) -> dict[int, Any]:
    """By address, what holds tensors, arrays or marks, however deep: looked for once for the whole
    nest.
    """
    holders: dict[int, Any] = {}
    walk = _NestWalk(nest)
    for item in walk:
        if isinstance(item, torch.Tensor | np.ndarray | Whole):
            walk.note_holders(holders)
        elif type(item) not in _ATOMS:
            inside = _plain_tensors(item)
            if inside:
                holders[id(item)] = item
                walk.note_holders(holders)
            elif inside is None:
                walk.enter(item)
    return holders


def split_batch(batch: Any, size: int, rows: int | None = None) -> Iterator[Any]:
    """Parts of at most `size` rows: tensors as views, lists with them; numbers and strings go into
    each as they are. `rows` are the batch's, if they were counted.

    >>> list(split_batch({"x": torch.arange(3), "text": ["a", "b", "c"]}, 2))
    [{'x': tensor([0, 1]), 'text': ['a', 'b']}, {'x': tensor([2]), 'text': ['c']}]
    """
    if _is_plain_tensor(batch):
        yield from (batch[start : start + size] for start in range(0, len(batch), size))
        return
    held = _plain_tensors(batch) if type(batch) is dict else None
    if held and rows is not None and _rows_of_tensors(held) == rows:
        for start in range(0, rows, size):
            yield _replaced_inside(batch, held, operator.itemgetter(slice(start, start + size)))
        return
    holders = _holders(batch)
    for start in range(0, _size_of(batch, holders) if rows is None else rows, size):
        yield _take(batch, slice(start, start + size), holders)


def take_rows(nest: Any, rows: slice) -> Any:
    """These rows of a nest."""
    return _take(nest, rows, _holders(nest))


def _take(nest: Any, rows: slice, holders: Mapping[int, Any]) -> Any:
    return _map_rows(nest, holders, operator.itemgetter(rows))


def _map_rows(nest: Any, holders: Mapping[int, Any], function: Callable[[Any], Any]) -> Any:
    """The nest with `function(item)` in the place of everything that has rows."""

    return _map_many([nest], lambda items: _replaced(items[0], holders, function))


def _replaced(item: Any, holders: Mapping[int, Any], function: Callable[[Any], Any]) -> Any:
    if isinstance(item, torch.Tensor | np.ndarray):
        return function(item) if item.ndim else item
    if isinstance(item, Whole):
        return item
    if type(item) in (list, dict) and (inside := _plain_tensors(item)):
        return _replaced_inside(item, inside, function)
    return function(item) if _is_row_list(item, holders) else _INSIDE


def _replaced_inside(
    nest: list[Any] | dict[Any, Any],
    tensors: Sequence[torch.Tensor],
    function: Callable[[Any], Any],
) -> Any:
    """The same of what holds these plain tensors, and else only what has no rows."""
    if 0 in set(map(_dimensions_of, tensors)):
        results = iter([function(tensor) if tensor.ndim else tensor for tensor in tensors])
    else:
        results = map(function, tensors)
    if len(tensors) < len(nest):
        items = nest.values() if isinstance(nest, dict) else nest
        results = iter([next(results) if type(one) is torch.Tensor else one for one in items])
    return dict(zip(nest, results, strict=True)) if isinstance(nest, dict) else [*results]


class Copies:
    """A nest that is handed out again and again: the same tensors, arrays and items, each time in
    new containers.

    >>> copies = Copies({"x": torch.arange(2), "text": ["a", "b"]})
    >>> copies.another()["text"].pop(), copies.another()["text"]
    ('b', ['a', 'b'])
    """

    def __init__(self, nest: Any) -> None:
        self._nest, self._holders = nest, _holders(nest)
        self.tensors = list(leaves(nest))

    def another(self) -> Any:
        return _map_many([self._nest], self._copied)

    def _copied(self, items: Sequence[Any]) -> Any:
        item = items[0]
        if isinstance(item, torch.Tensor | np.ndarray | Whole):
            return item
        if type(item) in (list, dict) and _plain_tensors(item):
            return item.copy()
        return item[:] if _is_row_list(item, self._holders) else _INSIDE


def unmarked(nest: Any) -> Any:
    """The nest as `loss_fn` is given it: without the marks of `whole`; the nest itself where there
    are none.
    """
    return unmarked_with_leaves(nest)[0]


def unmarked_with_leaves(nest: Any) -> tuple[Any, list[torch.Tensor]]:
    """The same, and its tensors in order, in one walk where there are no marks."""
    if isinstance(nest, torch.Tensor):
        return nest, [nest]
    held = _plain_tensors(nest)
    if held is not None:
        return nest, [*held]
    tensors: list[torch.Tensor] = []
    walk = _NestWalk(nest)
    for item in walk:
        if isinstance(item, Whole):
            plain = _without_marks(nest)
            return plain, list(leaves(plain))
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif type(item) not in _ATOMS:
            inside = _plain_tensors(item)
            if inside is None:
                walk.enter(item)
            else:
                tensors += inside
    return nest, tensors


def _without_marks(nest: Any) -> Any:
    holders = _holders(nest)
    return _map_many([nest], lambda items: _content(items[0], holders))


def _content(item: Any, holders: Mapping[int, Any]) -> Any:
    if isinstance(item, Whole):
        return item.content
    return item if isinstance(item, torch.Tensor) or _is_row_list(item, holders) else _INSIDE


def repeat_rows(batch: Any, rows: int) -> Any:
    """A batch of `rows` rows, the given ones over and over; the batch itself if it has as many.

    >>> repeat_rows(torch.arange(3), 7).tolist()
    [0, 1, 2, 0, 1, 2, 0]
    """
    have = _size_of(batch, _holders(batch))
    return batch if have == rows else pick_rows(batch, [row % have for row in range(rows)])


def pick_rows(batch: Any, order: list[int]) -> Any:
    """The rows at these positions, in this order.

    >>> pick_rows({"x": torch.arange(3), "text": ["a", "b", "c"]}, [2, 0])
    {'x': tensor([2, 0]), 'text': ['c', 'a']}
    """
    indices: dict[torch.device, torch.Tensor] = {}
    return _map_rows(batch, _holders(batch), lambda item: _rows_in_order(item, order, indices))


def _rows_in_order(item: Any, order: list[int], indices: dict[torch.device, torch.Tensor]) -> Any:
    """The rows of one entry; `indices` are the order as a tensor, made once for each device."""
    if isinstance(item, torch.Tensor):
        if item.device not in indices:
            indices[item.device] = torch.tensor(order, device=item.device)
        return item[indices[item.device]]
    return item[order] if isinstance(item, np.ndarray) else type(item)(item[row] for row in order)


def join_chunks(outputs: Sequence[Any], total: int, dim: int = 0) -> Any:
    """Outputs of the parts as the output of the whole: tensors joined along one dimension.

    >>> join_chunks([torch.zeros(2, 3), torch.ones(1, 3)], 3).shape
    torch.Size([3, 3])
    """
    return _map_many(
        outputs,
        lambda parts: _join(parts, total, dim) if isinstance(parts[0], torch.Tensor) else _INSIDE,
    )


def _join(parts: Sequence[torch.Tensor], total: int, dim: int) -> torch.Tensor:
    if not _make(total, parts, dim):
        shapes = [tuple(part.shape) for part in parts[:3]]
        along = f" along dim {dim}" if dim else ""
        raise MisuseError(
            f"The chunks' outputs cannot be joined into {total} rows{along}: their shapes are"
            f" {shapes}… Return one row per row of the chunk; take means and sums outside of"
            " chunked()."
        )
    return torch.cat(list(parts), dim)


def _make(total: int, parts: Sequence[torch.Tensor], dim: int) -> bool:
    """Whether parts have so many rows together along a dimension that all of them have."""
    if any(part.dim() <= dim for part in parts):
        return False
    return sum(part.size(dim) for part in parts) == total


def map_tensors(nest: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest with each tensor replaced by `function(tensor)`.

    >>> map_tensors({"x": torch.ones(2), "name": "a"}, lambda tensor: tensor.sum().item())
    {'x': 2.0, 'name': 'a'}
    """
    return _map_many(
        [nest], lambda items: function(items[0]) if isinstance(items[0], torch.Tensor) else _INSIDE
    )


_INSIDE = object()  # what is returned for an item that is to be looked into


class _Level:
    """A nest that is being made again, from the corresponding items of several."""

    def __init__(
        self, like: Any, groups: Iterable[Sequence[Any]], keys: Sequence[Any] = ()
    ) -> None:
        self.like, self.groups, self.keys = like, iter(groups), keys
        self.results: list[Any] = []

    @classmethod
    def of(cls, nests: Sequence[Any]) -> _Level | None:
        """For the first of these nests; None if it is no nest, or holds nothing that could be
        another thing.
        """
        like = nests[0]
        if isinstance(like, Mapping):
            return cls(like, ([nest[key] for nest in nests] for key in like), tuple(like))
        if isinstance(like, list | tuple):
            return cls(like, zip(*nests, strict=True))
        names = _fields_of(like)
        if not names:
            return None
        return cls(like, ([getattr(nest, name) for nest in nests] for name in names), names)

    def finish(self) -> Any:
        like, results = self.like, self.results
        if isinstance(like, list | tuple):
            return type(like)(*results) if hasattr(like, "_fields") else type(like)(results)
        items = dict(zip(self.keys, results, strict=True))
        if isinstance(like, Mapping):
            return _mapping_like(like, items)
        return dataclasses.replace(like, **items)


def _mapping_like(like: Any, items: dict[Any, Any]) -> Any:
    if type(like) is dict:
        return items
    try:
        return type(like)(items)  # BatchEncoding, OrderedDict, ModelOutput, …
    except TypeError:
        return type(like)(**items)


def _map_many(nests: Sequence[Any], function: Callable[[Sequence[Any]], Any]) -> Any:
    """The nest made again from the corresponding items of several: `function` gives what stands in
    their place.

    Where it gives `_INSIDE`, they are looked into; what is no nest is then the first of them.
    Without recursion.
    """
    outermost = _Level(None, [nests])
    levels = [outermost]
    while True:
        level = levels[-1]
        items = next(level.groups, None)
        if items is None:
            levels.pop()
            if level is outermost:
                return level.results[0]
            levels[-1].results.append(level.finish())
            continue
        result = function(items)
        if result is _INSIDE:
            inner = None if type(items[0]) in _ATOMS else _Level.of(items)
            if inner is not None:
                levels.append(inner)
                continue
            result = items[0]
        level.results.append(result)
