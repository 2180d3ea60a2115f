"""What the document "Automatic differentiation" prints, one function for each of its examples.

python examples/document_autograd.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradfit as gf


def randn(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape) * std).requires_grad_()


def computation_graph() -> Tensor:
    x = randn(10, 5)
    w = randn(5, 3, std=0.1)
    b = torch.zeros(3).requires_grad_()

    # Forward pass builds the graph
    y = x.matmul(w)  # Records MatMul operation
    z = y.add(b)  # Records Add operation
    loss = z.sum()  # Records Sum operation

    for entry in gf.AutogradContext.graph(loss):
        print(
            entry.op,
            "inputs",
            entry.inputs,
            "output",
            entry.output,
            "saved",
            len(entry.saved_tensors),
        )
    return loss


def backward_pass() -> None:
    x, w, b = randn(10, 5), randn(5, 3, std=0.1), torch.zeros(3).requires_grad_()
    loss = x.matmul(w).add(b).sum()

    # Compute gradients
    grads = gf.backward(loss)

    # Access gradients
    x_grad = grads.get(id(x))
    w_grad = grads.get(id(w))
    b_grad = grads.get(id(b))
    assert (x_grad.shape, w_grad.shape, b_grad.tolist()) == (x.shape, w.shape, [10.0] * 3)


def gradient_rules() -> None:
    def check(result: Tensor, *formulas: tuple[Tensor, Tensor]) -> None:
        """The gradients of `result`, for a gradient of ones, are those of the formulas."""
        grads = gf.backward(result.sum(), [tensor for tensor, _ in formulas])
        for tensor, formula in formulas:
            torch.testing.assert_close(grads[tensor], formula.expand_as(tensor))

    a, b, one = randn(4, 4), randn(4, 4), torch.ones(4, 4)
    check(a.add(b), (a, one), (b, one))
    check(a.sub(b), (a, one), (b, -one))
    check(a.mul(b), (a, b), (b, a))
    check(a.div(b), (a, one / b), (b, -a / b**2))

    check(a.matmul(b), (a, one @ b.T), (b, a.T @ one))
    check(a.t(), (a, one.T))

    x = randn(4, 4)
    check(x.relu(), (x, (x > 0).float()))
    check(x.sigmoid(), (x, x.sigmoid() * (1 - x.sigmoid())))
    check(x.tanh(), (x, 1 - x.tanh() ** 2))

    check(x.sum(), (x, one))
    check(x.mean(), (x, one / x.numel()))
    check(x.sum(1, keepdim=False), (x, one))


def gradient_accumulation() -> None:
    model, accumulation_steps = nn.Linear(5, 1), 4
    batches = [(torch.randn(8, 5), torch.randn(8, 1)) for _ in range(accumulation_steps)]
    accumulated_grads = gf.GradientMap()

    for inputs, targets in batches:
        output = model.forward(inputs)
        loss = nn.functional.mse_loss(output, targets)

        # Scale loss for accumulation
        scaled_loss = loss.mul(1.0 / accumulation_steps)
        grads = gf.backward(scaled_loss, model)

        # Accumulate gradients
        for tensor_id, grad in grads.iter():
            acc_grad = accumulated_grads.get_mut(tensor_id)
            if acc_grad is not None:
                acc_grad.add_(grad)
            else:
                accumulated_grads.insert(tensor_id, grad.clone())

    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    full = gf.backward(nn.functional.mse_loss(model(inputs), targets), model)
    for name, grad in full.iter():
        torch.testing.assert_close(accumulated_grads[name], grad)


def gradient_checkpointing() -> None:
    layer1, input = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), randn(4, 8)

    # In forward pass
    with gf.CheckpointScope("layer1"):  # Don't save x1 in computation graph
        x1 = layer1.forward(input)

    # In backward pass, recompute x1
    grad_input = gf.backward(x1.square().sum(), [input])[input]
    assert torch.equal(grad_input, gf.backward(layer1(input).square().sum(), [input])[input])


def custom_backward_functions() -> None:
    def forward(inputs: list[Tensor]) -> Tensor:
        # Custom forward computation
        x = inputs[0]
        return x.mul(2.0)

    def backward(grad_output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        # Custom gradient computation
        grad_input = grad_output.mul(2.0)
        return [grad_input]

    # Usage
    custom_op = gf.custom_op(forward=forward, backward=backward)
    x = randn(3)
    assert gf.backward(custom_op(x).sum())[x].tolist() == [2.0, 2.0, 2.0]


def gradient_clipping() -> None:
    x = randn(10)
    grads = gf.backward((x * 100).sum())
    clipper = gf.GradientClipper(1.0)  # max norm = 1.0
    norm = clipper.clip_grads(grads)
    print(f"clipped from {norm:.1f} to {grads.norm():.1f}")
    assert grads.norm() <= 1.0 + 1e-6


def no_gradient_context() -> None:
    x, w = randn(10, 5), randn(5, 3)

    # Method 1: Detach tensors
    y = x.detach().matmul(w.detach())
    assert not y.requires_grad

    # Method 2: No grad context
    with gf.AutogradContext.no_grad():
        y = x.matmul(w)  # No gradient tracking
    assert not y.requires_grad


def topological_sort() -> None:
    entries = list(gf.AutogradContext.graph(computation_graph()))
    backward_order = [entries[at].op for at in gf.topological_sort(entries)]
    print("backward:", ", ".join(backward_order))
    assert backward_order == ["Sum", "Add", "Mm"]


def training_loop() -> None:
    model, loss_fn, num_epochs = nn.Linear(5, 1), nn.functional.mse_loss, 2
    dataloader = [(torch.randn(8, 5), torch.randn(8, 1)) for _ in range(3)]
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    for _epoch in range(num_epochs):
        for inputs, target in dataloader:
            # Forward pass
            output = model.forward(inputs)
            loss = loss_fn(output, target)

            # Backward pass
            grads = gf.backward(loss, model)

            # Update parameters
            grads.assign()  # torch's optimizers take their gradients from .grad
            optimizer.step()

            # Clear gradients
            gf.AutogradContext.clear()


def mixed_precision_training() -> None:
    x = randn(10)
    loss = x.square().sum()

    # Scale loss for FP16 training
    scale = 1024.0
    scaled_loss = loss.mul(scale)
    grads = gf.backward(scaled_loss)

    # Unscale gradients before optimizer step
    for _, grad in grads.iter_mut():
        grad.mul_(1.0 / scale)
    assert torch.equal(grads[x], 2 * x)


def gradient_debugging() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    grads = gf.backward(x.sqrt().sum())

    # Check for NaN/Inf gradients
    for tensor_id, grad in grads.iter():
        if not grad.isfinite().all():
            print("Invalid gradient detected for tensor", tensor_id)
    assert grads.nonfinite()[0] is x

    # Print gradient statistics
    grad = gf.backward(x.square().sum())[x]
    grad_norm = grad.square().sum().sqrt()
    print(f"Gradient norm: {grad_norm}")


def second_order_gradients() -> None:
    # Compute gradient of gradient (Hessian-vector products)
    x = randn(10)
    y = x.square().sum()

    # First gradient
    grads = gf.backward(y, create_graph=True)
    x_grad = grads.get(id(x))

    # Second gradient (requires gradient of gradient)
    grad_sum = x_grad.sum()
    second_grads = gf.backward(grad_sum)
    assert torch.equal(second_grads[x], torch.full((10,), 2.0))


def use_detach_for_non_training_paths() -> None:
    model, input = nn.Sequential(nn.Flatten(), nn.ReLU()), randn(2, 4)

    # For validation/inference
    output = model.forward(input.detach())
    assert not output.requires_grad


def profile_memory_usage() -> None:
    loss = randn(256, 256).exp().sum()

    # Check autograd memory usage
    memory_stats = gf.AutogradContext.memory_stats()
    print(f"Saved tensors: {memory_stats.saved_memory_mb} MB")
    assert memory_stats.saved_memory_mb >= 0.25

    # After each training step
    gf.AutogradContext.clear()
    assert gf.AutogradContext.memory_stats().saved_memory_mb == 0.0
    del loss


def numerical_gradient_checking() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().sum()

    x, eps = randn(6), 1e-3

    # As printed, element by element …
    y = f(x)
    analytical_grads = gf.backward(y)
    for i in range(x.numel()):
        step = torch.zeros(6)
        step[i] = eps
        numerical_grad = (f(x + step) - f(x - step)) / (2.0 * eps)
        assert abs(numerical_grad - analytical_grads[x][i]) < 1e-3

    # … and in one call, which also knows how far two right answers may differ.
    print(gf.check_gradients(f, x, eps=eps))


EXAMPLES: list[Callable[[], object]] = [
    computation_graph,
    backward_pass,
    gradient_rules,
    gradient_accumulation,
    gradient_checkpointing,
    custom_backward_functions,
    gradient_clipping,
    no_gradient_context,
    topological_sort,
    training_loop,
    mixed_precision_training,
    gradient_debugging,
    second_order_gradients,
    use_detach_for_non_training_paths,
    profile_memory_usage,
    numerical_gradient_checking,
]

if __name__ == "__main__":
    torch.manual_seed(0)
    for example in EXAMPLES:
        print(f"-- {example.__name__.replace('_', ' ')}")
        example()
