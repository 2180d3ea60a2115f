"""The forward that stands in for a module's own while it runs in tiles."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gradfit._torch_fsdp import is_unit
from gradfit._torch_listen import unseen, untraced
from gradfit.errors import MisuseError
from gradfit.not_copied import NotCopied
from gradfit.tiling.cut import Cut
from gradfit.tiling.heads import is_linear
from gradfit.tiling.module_tiles import run_in_tiles
from gradfit.tiling.token_wise import mixes_tokens
from gradfit.tiling.whole_here import runs_whole, whole_modules

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_WIDER = 2.0  # than its input, what a module makes inside: less is not worth running it again


class TiledForward(NotCopied):
    """Runs the module in tiles, if it treats each token by itself, which is found out when it is
    first called.

    Args:
        module: whose forward this stands in for.
        name: of the module.
        cut: how many tokens at a time.
        is_named: the user asked for this module: say why it cannot be, instead of leaving it alone.
        is_checked: it was found out before.
    """

    _instead_of_copy = "Call remove() on what gf.tile returned, copy the model, and tile both."

    def __init__(
        self,
        module: nn.Module,
        name: str,
        cut: Cut,
        *,
        is_named: bool = False,
        is_checked: bool = False,
    ) -> None:
        self._module, self.name, self._cut, self._is_named = module, name, cut, is_named
        # why it cannot run in tiles; None before it is known
        self.reason: str | None = "" if is_checked else None
        self.tokens = 0  # of the largest input

    @property
    def is_tiled(self) -> bool:
        return self.reason == "" and self.tokens > 0

    # Not traced by torch.compile: it finds out about the module by running it.
    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if runs_whole() or not self._may_tile(args, kwargs):
            return type(self._module).forward(self._module, *args, **kwargs)
        x = args[0]
        self.tokens = max(self.tokens, x.numel() // x.shape[-1])
        return run_in_tiles(self._module, x, self._cut)

    def _may_tile(self, args: Any, kwargs: Any) -> bool:
        """Whether this call may run in tiles; the first that could be is looked at."""
        if self.reason or not _is_one_input(args, kwargs):
            return False
        if self.reason is None:
            self.reason = self._find_reason(args[0])
            self._require_if_named()
        return not self.reason

    def _find_reason(self, x: Tensor) -> str:
        with whole_modules(), unseen():
            reason = mixes_tokens(self._module, x)
        if reason or self._is_named or _is_wider_inside(self._module, x.shape[-1]):
            return reason
        return "what it makes inside is no wider than its input"

    def _require_if_named(self) -> None:
        if self.reason and self._is_named:
            raise MisuseError(
                f"{self.name} cannot run in tiles of tokens: {self.reason}. Leave it out of"
                " gf.tile(modules=…)."
            )


def _is_one_input(args: Any, kwargs: Any) -> bool:
    """Whether a module is called with one tensor of tokens, and nothing else that is not None."""
    others = (*args[1:], *kwargs.values())
    return bool(args) and _is_of_tokens(args[0]) and all(each is None for each in others)


def _is_of_tokens(x: Any) -> bool:
    """A plain tensor of numbers: tokens with features, or rows of them."""
    is_plain = type(x) is Tensor and x.is_floating_point()
    return is_plain and x.dim() in (2, 3) and x.numel() > 0


def _is_wider_inside(module: nn.Module, width: int) -> bool:
    widths: list[Any] = [each.out_features for each in module.modules() if is_linear(each)]
    # experts, as one tensor
    stacked = [p.numel() // width for p in module.parameters() if p.dim() == 3]
    return sum(widths) + sum(stacked) > _WIDER * width and len(widths) + len(stacked) > 1


def may_run_in_tiles(module: nn.Module) -> bool:
    """Whether a module is worth a check: it has several linear layers, and nobody has hooks
    inside.
    """
    inside = [each for each in module.modules() if each is not module]
    return bool(inside) and _may_be_replaced(module) and all(map(_may_be_inside, inside))


def _may_be_replaced(module: nn.Module) -> bool:
    """Whether the forward is the module's own, has parameters, and nobody waits for what goes
    through it.
    """
    is_own = "forward" not in module.__dict__ and not isinstance(module, _LISTS)
    is_hooked = module._backward_hooks or module._backward_pre_hooks
    return is_own and not is_hooked and next(module.parameters(), None) is not None


def _may_be_inside(module: nn.Module) -> bool:
    """Not a unit of FSDP2, which would be gathered for each tile."""
    return not (_has_hooks(module) or "forward" in module.__dict__ or is_unit(module))


def _has_hooks(module: nn.Module) -> bool:
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
        module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks)
