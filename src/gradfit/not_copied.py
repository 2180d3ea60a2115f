"""Objects that belong to something alive, a model's hooks or its parameters: a copy would belong to
nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from gradfit.errors import MisuseError


class NotCopied:
    """Refuses `copy.copy`, `copy.deepcopy` and `pickle`; `_instead_of_copy` says what to do."""

    _instead_of_copy: ClassVar[str] = "Make another one."

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise MisuseError(
            f"A {type(self).__name__} cannot be copied or pickled: it belongs to the tensors it was"
            f" made for. {self._instead_of_copy}"
        )
