"""Random programs on a small set of tensors, run plainly and on the tape.

A program is a list of instructions (name, a, b, c): `a` and `b` choose operands among what has been
made so far, `c` is a number for whatever the instruction needs one for. Every instruction leaves a
tensor of shape (4, 6), often with odd strides, offsets or shared storage, so that any can follow
any. An instruction that torch refuses (writing to a leaf, to an expanded tensor) is skipped and
noted, so that both runs can be checked to have skipped the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

ROWS, COLUMNS = 4, 6
Instruction = tuple[str, int, int, int]
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {}


def operation(function: Callable[[torch.Tensor, torch.Tensor, int], Any]) -> Any:
    OPERATIONS[function.__name__] = function
    return function


def _define(name: str, function: Callable[[torch.Tensor, torch.Tensor, int], Any]) -> None:
    OPERATIONS[name] = function


# ---------------------------------------------------------------------------- pointwise, reductions
_define("add", lambda a, b, c: a + b)
_define("mul", lambda a, b, c: a * b)
_define("div", lambda a, b, c: a / (b.abs() + 1))
_define("tanh", lambda a, b, c: a.tanh())
_define("sigmoid", lambda a, b, c: torch.sigmoid(a))
_define("gelu", lambda a, b, c: F.gelu(a))
_define("sin", lambda a, b, c: a.sin())
_define("softmax", lambda a, b, c: a.softmax(c % 2))
_define("where", lambda a, b, c: torch.where(a > b, a, b * 2))
_define("matmul", lambda a, b, c: a @ b.t() @ a)
_define("mean", lambda a, b, c: a - a.mean(c % 2, keepdim=True))
_define("logsumexp", lambda a, b, c: a - a.logsumexp(1, keepdim=True))
_define("norm", lambda a, b, c: a / (a.norm() + 1))
_define("cumsum", lambda a, b, c: a.cumsum(1).tanh())
_define("layer_norm", lambda a, b, c: F.layer_norm(a, (COLUMNS,)))
_define("batch_norm", lambda a, b, c: F.batch_norm(a, None, None, training=True))
_define("einsum", lambda a, b, c: torch.einsum("ij,kj,kl->il", a, b, a).tanh())
_define("flip", lambda a, b, c: a.flip(c % 2))
_define("roll", lambda a, b, c: a.roll(c, 1))
_define("clone", lambda a, b, c: a.clone())
_define("contiguous", lambda a, b, c: a.t().contiguous().t())
_define("pad", lambda a, b, c: F.pad(a, (1, 1))[:, 1:-1])
_define("lerp", lambda a, b, c: torch.lerp(a, b, 0.25))
_define("addmm", lambda a, b, c: torch.addmm(a, a, b.t() @ b).tanh())
_define("prod", lambda a, b, c: a * a.tanh().prod(1, keepdim=True))
_define("to_half_and_back", lambda a, b, c: a.to(torch.bfloat16).to(a.dtype))
_define("embedding", lambda a, b, c: F.embedding(torch.tensor([0, c % ROWS, 1, 0]), a))
_define("gather", lambda a, b, c: a.gather(1, torch.arange(COLUMNS).flip(0).expand(ROWS, -1)))
_define("index", lambda a, b, c: a[torch.tensor([c % ROWS, 0, 1, 1])])
_define("masked_select", lambda a, b, c: a * a[a > 0].sum())
_define("nonzero", lambda a, b, c: a + (b > 0).nonzero().sum())
_define("detach", lambda a, b, c: a.detach() * b)
_define("cat", lambda a, b, c: torch.cat([a, b, a])[1 : 1 + ROWS])
_define("stack", lambda a, b, c: torch.stack([a, b], c % 3).sum(c % 3))
_define("baddbmm", lambda a, b, c: torch.baddbmm(a[None], a[None], (b.t() @ b)[None])[0].tanh())
_define(
    "conv",
    lambda a, b, c: F.conv1d(a[None], b[:, None, :3].contiguous(), padding=1, groups=ROWS)[0],
)

# -------------------------------------------------------------------------------------------- views
_define("view", lambda a, b, c: a.contiguous().view(COLUMNS, ROWS).view(ROWS, COLUMNS))
_define("transposed", lambda a, b, c: a.reshape(COLUMNS, ROWS).t())
_define("slice", lambda a, b, c: torch.cat([a, b], 1)[:, c % 5 : c % 5 + COLUMNS])
_define("strided", lambda a, b, c: torch.cat([a, b], 1)[:, c % 2 :: 2])
_define("as_strided", lambda a, b, c: a.contiguous().as_strided((ROWS, COLUMNS), (COLUMNS, 1), 0))
_define(
    "as_strided_overlap", lambda a, b, c: (a * 1).as_strided((ROWS, COLUMNS), (1 + c % 4, 2), c % 3)
)
_define("expand", lambda a, b, c: a[c % ROWS].expand(ROWS, COLUMNS))
_define("expand_column", lambda a, b, c: a[:, c % COLUMNS :][:, :1].expand(ROWS, COLUMNS))
_define("diagonal", lambda a, b, c: a + a.diagonal().sum())
_define("unfold", lambda a, b, c: torch.cat([a, b]).flatten().unfold(0, COLUMNS, 2)[:ROWS])
_define("narrow", lambda a, b, c: torch.stack([a, b]).select(0, c % 2))
_define("view_of_leaf_or_not", lambda a, b, c: a.view_as(a))
_define(
    "int_bits",
    lambda a, b, c: (
        (a * 1)
        .detach()
        .view(torch.int32 if a.dtype == torch.float32 else torch.int64)
        .bitwise_and(-256)
        .view(a.dtype)
        * b
    ),
)
_define(
    "complex",
    lambda a, b, c: torch.view_as_real(torch.complex(a, b) * torch.complex(b, a))[..., c % 2],
)
_define("conj", lambda a, b, c: (torch.complex(a, b).conj() * torch.complex(a, a)).imag)
_define(
    "conj_matmul",
    lambda a, b, c: (torch.complex(a, b).conj() @ torch.complex(a, b).t()).real.tanh() @ a,
)
_define("neg_view", lambda a, b, c: torch.complex(a, b).conj().imag * a)
_define("fft", lambda a, b, c: torch.fft.ifft(torch.fft.fft(a) * torch.fft.fft(b)).real.tanh())


# ---------------------------------------------------------------------------------- several outputs
_define("split", lambda a, b, c: torch.cat(list(torch.split(a, [2, 1, 3], 1))[::-1], 1))
_define("split_one", lambda a, b, c: torch.cat([a, b], 1).chunk(2, 1)[c % 2])
_define(
    "unbind", lambda a, b, c: torch.stack([a.tanh().unbind(0)[(i + c) % ROWS] for i in range(ROWS)])
)
_define("topk", lambda a, b, c: a.topk(COLUMNS, 1)[0] + a.topk(2, 1).values.sum())
_define("max", lambda a, b, c: a * a.max(1, keepdim=True)[0])
_define("sort", lambda a, b, c: a.sort(1).values)
_define("median", lambda a, b, c: a - a.median(0).values)
_define(
    "var_mean",
    lambda a, b, c: (
        (a - torch.var_mean(a, 1, keepdim=True)[1]) / (1 + torch.var_mean(a, 1, keepdim=True)[0])
    ),
)
_define(
    "qr",
    lambda a, b, c: torch.linalg.qr(a.t() @ a + 3 * torch.eye(COLUMNS, dtype=a.dtype))[0][:ROWS],
)
_define("max_pool", lambda a, b, c: F.max_pool1d(a[None], 3, 1, 1)[0])
_define("group_norm", lambda a, b, c: F.group_norm(a[None], 2)[0])
_define(
    "attention",
    lambda a, b, c: F.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None])[
        0, 0
    ],
)
_define(
    "foreach", lambda a, b, c: torch._foreach_mul(torch._foreach_add([a, b], 1.0), [b, a])[c % 2]
)


# ------------------------------------------------------------------------------------------- random
_define("dropout", lambda a, b, c: F.dropout(a, 0.3))
_define("alpha_dropout", lambda a, b, c: F.alpha_dropout(a, 0.2, training=True))
_define("rand", lambda a, b, c: a * torch.rand(COLUMNS, dtype=a.dtype))
_define("rand_like", lambda a, b, c: a + torch.randn_like(b))
_define("randperm", lambda a, b, c: a[torch.randperm(ROWS)])
_define("bernoulli", lambda a, b, c: a * torch.bernoulli(a.detach().sigmoid()))
_define(
    "multinomial", lambda a, b, c: a[torch.multinomial(torch.ones(ROWS), ROWS, replacement=True)]
)
_define("rrelu", lambda a, b, c: F.rrelu(a, training=True))
_define("randint", lambda a, b, c: a * torch.randint(1, 3, (ROWS, 1)))
_define(
    "generator",
    lambda a, b, c: (
        a * torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(c), dtype=a.dtype)
    ),
)


# ----------------------------------------------------------------------------------------- in place
_define("add_", lambda a, b, c: a.add_(b))
_define("mul_", lambda a, b, c: a.mul_(b))
_define("tanh_", lambda a, b, c: a.tanh_())
_define("sigmoid_", lambda a, b, c: a.sigmoid_())
_define("relu_", lambda a, b, c: F.relu(a, inplace=True))
_define("leaky_relu_", lambda a, b, c: F.leaky_relu(a, 0.1, inplace=True))
_define("silu_", lambda a, b, c: F.silu(a, inplace=True))
_define("dropout_", lambda a, b, c: F.dropout(a, 0.4, inplace=True))
_define("uniform_", lambda a, b, c: a * torch.empty_like(b).uniform_())
_define("zero_", lambda a, b, c: a.zero_())
_define("fill_", lambda a, b, c: a.fill_(0.5))
_define("copy_", lambda a, b, c: a.copy_(b))
_define("masked_fill_", lambda a, b, c: a.masked_fill_(b > 0, 0.25))
_define("index_fill_", lambda a, b, c: a.index_fill_(0, torch.tensor([c % ROWS]), 2.0))
_define("scatter_", lambda a, b, c: a.scatter_(1, torch.tensor([[c % COLUMNS]] * ROWS), 0.5))
_define(
    "scatter_add_",
    lambda a, b, c: a.scatter_add_(1, torch.zeros(ROWS, 2, dtype=torch.long), b[:, :2]),
)
_define("index_add_", lambda a, b, c: a.index_add_(0, torch.tensor([c % ROWS, 0]), b[:2]))
_define("index_copy_", lambda a, b, c: a.index_copy_(0, torch.tensor([c % ROWS]), b[:1]))
_define("clamp_", lambda a, b, c: a.clamp_(-0.5, 0.5))
_define("neg_", lambda a, b, c: a.neg_())
_define("exp_", lambda a, b, c: a.clamp(max=1).exp_())
_define("addcmul_", lambda a, b, c: a.addcmul_(b, b, value=0.1))
_define("out", lambda a, b, c: _no_grad(lambda: torch.add(a, b, out=torch.empty_like(b))) * a)
_define("out_reused", lambda a, b, c: _no_grad(lambda: torch.mul(a, b, out=a.clone())) + b)
_define("empty_copy", lambda a, b, c: torch.empty(ROWS, COLUMNS, dtype=a.dtype).copy_(a) * b)
_define("zeros_add", lambda a, b, c: torch.zeros(ROWS, COLUMNS, dtype=a.dtype).add_(a).mul_(b))
_define("transpose_", lambda a, b, c: a.clone().t_().t_())
_define("unsqueeze_", lambda a, b, c: a.clone().unsqueeze_(0).squeeze_(0))
_define("resize_", lambda a, b, c: _no_grad(lambda: a.clone().resize_(2, COLUMNS)).sum() * b)
_define(
    "set_",
    lambda a, b, c: (
        _no_grad(
            lambda: torch.empty(0, dtype=a.dtype).set_((a * 2).detach())  # type: ignore[call-overload]
        )
        * b
    ),
)
_define(
    "complex_", lambda a, b, c: torch.complex(a, b).mul_(torch.complex(b, b)).conj_physical_().imag
)


@operation
def foreach_(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    made = a if a._base is None else a.clone()  # a scope refuses views
    torch._foreach_mul_([made], 0.5)
    return made


@operation
def set_row(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    a[c % ROWS] = b[0]
    return a


@operation
def set_column_of_empty(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    made = torch.empty_like(a, memory_format=torch.contiguous_format)
    made[:, :3] = a[:, :3]
    made[:, 3:] = b[:, 3:]
    return made.sin()


@operation
def index_put_(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    a[torch.tensor([c % ROWS, 1]), torch.tensor([0, c % COLUMNS])] = b[0, 0]
    return a


@operation
def index_put_mask_(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    a[b > 0] = 0.125
    return a


@operation
def write_through_view(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    a.t()[c % COLUMNS].mul_(1.5)
    return a


@operation
def write_through_detached(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    made = a * b
    made.detach().add_(1.0)
    return made * 2


@operation
def swap_rows(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    made = a * 1.0
    made[0].copy_(made[1].clone())
    made[1:3] = made[0:2].clone()
    return made


# ----------------------------------------------------- another geometry of the same memory, unheard
PLACES = [((1, ROWS), 0), ((0, 1), COLUMNS), ((2, 1), 3), ((COLUMNS, 1), 0), ((1, 2), 5)]


def _moved(a: torch.Tensor, c: int) -> torch.Tensor:
    made = a * 2.0
    stride, offset = PLACES[c % len(PLACES)]
    made.data = made.data.as_strided((ROWS, COLUMNS), stride, offset)
    return made


_define("moved", lambda a, b, c: _moved(a, c))
_define("moved_and_written", lambda a, b, c: _moved(a, c).mul_(b))
_define("moved_after_write", lambda a, b, c: _moved(a.clone().tanh_(), c).copy_(b).add_(a))


@operation
def moved_under_its_view(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    made = a * 2.0
    view = made.detach().t()
    made.data = made.data[c % 3 : c % 3 + 1].expand(ROWS, COLUMNS)
    view[c % COLUMNS].mul_(1.5)
    return made * b + view.t()


@operation
def moved_without_gradient(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    made = a.detach() * b.detach()
    made.data = made.data[c % 3 : c % 3 + 2, 1 : 3 + c % 3]
    made.clamp_(max=0.5)
    return a * made.sum() + (b[:2, : made.shape[1]] * made).sum()


# -------------------------------------------------------------------------------- control and modes
@operation
def branch_on_value(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    return a.exp().clamp(max=3) if a.sum().item() > 0 else b.cos()


@operation
def loop_on_value(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    while bool(a.abs().max() > 1):
        a = a / 2
    return a


@operation
def no_grad_island(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    with torch.no_grad():
        scale = (a * b).sigmoid()
        scale.mul_(2)
    return a * scale


@operation
def inference_island(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    with torch.inference_mode():
        scale = (a.detach() * b.detach()).sigmoid().mul_(2)
    return a * scale.clone()


@operation
def autocast_island(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        product = a.float() @ b.float().t()
        product = product @ a.float()
    return product.to(a.dtype).tanh()


@operation
def gradient_inside(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    with torch.enable_grad():
        x = a.detach().requires_grad_()
        (slope,) = torch.autograd.grad((x.sin() * b.detach()).sum(), x)
    return a * slope


@operation
def penalty_inside(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    x = (a * 1.0).requires_grad_()
    (slope,) = torch.autograd.grad((x.sin() * b).sum(), x, create_graph=True)
    return slope * a


@operation
def grad_written_by_backward(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    x = a.detach().clone().requires_grad_()
    x.grad = torch.zeros_like(x)
    (x.sin() * b.detach()).sum().backward()
    return x.grad * b


@operation
def default_dtype(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        scale = torch.full((ROWS, 1), 0.1).sin()
    finally:
        torch.set_default_dtype(before)
    return (a * scale).to(a.dtype)


@operation
def numpy_result(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    return a * torch.from_numpy(b.detach().cpu().numpy() * 2.0).to(a.device)


@operation
def numpy_into_empty(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    made = torch.empty(ROWS, COLUMNS, dtype=a.dtype, device="cpu")
    made.numpy()[:] = b.detach().cpu().numpy() + 1
    return (a * made.to(a.device)).sin()


@operation
def numpy_into_zeros(a: torch.Tensor, b: torch.Tensor, c: int) -> Any:
    made = torch.zeros(ROWS, COLUMNS, dtype=a.dtype, device="cpu")
    made.numpy()[:] = b.detach().cpu().numpy() + 1
    return (a * made.to(a.device)).sin()


class Square(torch.autograd.Function):
    """Saves an input, a result and something that is neither; keeps a number on its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: int) -> torch.Tensor:
        inner = x.tanh() * 3
        result = inner * inner
        ctx.save_for_backward(x, inner, result)
        ctx.power = power
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, inner, result = ctx.saved_tensors
        return grad * (inner + x.cos() + result * ctx.power), None


_define("function", lambda a, b, c: Square.apply(a, c))


def _no_grad(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return function()


# ------------------------------------------------------------------------------------------ running
CONTROL = ("enter", "enter", "leave", "leave", "mark")
NAMES = sorted(OPERATIONS)


class Run:
    """What one run of a program left behind."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.skipped: list[tuple[int, str]] = []
        self.error: Exception | None = None
        self.lost = False  # known to be refused when the forward ended
        self.rng: torch.Tensor = torch.empty(0)


def run(
    program: list[Instruction],
    dtype: torch.dtype,
    scope: Callable[[], Any],
    mark: Callable[[torch.Tensor], Any],
    *,
    whole: Any = None,
    hooks: Any = None,
    forget: bool = True,
    twice: bool = False,
) -> Run:
    """Run a program: `scope()` at every "enter", `whole` around everything, then one or two
    backward passes.
    """
    result = Run()
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1)
    leaves = [
        torch.randn(ROWS, COLUMNS, generator=source, dtype=dtype).requires_grad_() for _ in range(2)
    ]
    made: list[Any] = [
        *leaves,
        torch.randn(ROWS, COLUMNS, generator=source, dtype=dtype),
        leaves[0] * 1.0,
    ]
    with hooks or contextlib.nullcontext(), whole or contextlib.nullcontext():
        opened: list[contextlib.ExitStack] = []
        try:
            for number, (name, a, b, c) in enumerate(program):
                if name == "enter":
                    opened.append(contextlib.ExitStack())
                    opened[-1].enter_context(scope())
                elif name == "leave":
                    if opened:
                        opened.pop().close()
                elif name == "mark":
                    if opened or whole is not None:
                        mark(made[a % len(made)])
                else:
                    try:
                        made.append(OPERATIONS[name](made[a % len(made)], made[b % len(made)], c))
                    except RuntimeError as error:
                        result.skipped.append((number, type(error).__name__))
                        continue
                    # let a storage die, so that its address is used again
                    if forget and c % 3 == 0 and len(made) > 6:
                        del made[2 + c % (len(made) - 4)]
        finally:
            while opened:
                opened.pop().close()
    result.outputs = [tensor.detach().clone() for tensor in made[2:]]
    losses = [tensor.double().square().sum() for tensor in made[-3:] if tensor.requires_grad]
    try:
        if losses:
            loss = torch.stack(losses).sum()
            passes = 2 if twice else 1
            for number in range(passes):
                gradients = torch.autograd.grad(
                    loss, leaves, allow_unused=True, retain_graph=number < passes - 1
                )
                result.gradients += [g.clone() for g in gradients if g is not None]
    except RuntimeError as error:
        result.error = error
    result.rng = torch.get_rng_state()
    return result
