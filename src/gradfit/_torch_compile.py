"""Functions compiled by `torch.compile`, while somebody listens: private torch API, as in
`_torch.py`.

What inductor has compiled is called here as one operator, a `CompiledGraph`: a listener hears of it
with its inputs, and what it returns are the tensors that are new, those that it saves for its
backward among them. What the generated code does inside is nobody's operation: it writes to memory
without telling anybody, and its calls of torch's operators would be a tape with holes.

torch.compile looks at more than the arguments before it takes code that it has compiled: at the
dispatch keys of this thread, and at the hooks on modules. Both would be other ones while somebody
listens, and everything would be compiled again. So the key is switched off from where a compiled
function is called to where its graph is, and so are hooks of ours.

That is only sound if nothing runs in between. It is so where the code that dynamo has made begins
with a graph. Functions of another kind (a break before the first graph, a backend other than
inductor) run as they were written, as all do under somebody's dispatch mode.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from gradfit import _torch_listen as listen
from gradfit._torch import graph_task_id, storage_key
from gradfit._torch_one_operation import OneOperation, Telling, telling

_entries_of = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
_REGION = "_gradfit_compiled_graph"  # the attribute of a compiled graph that holds its operator
# Generated code calls kernels, in Python, from here to there: around it are imports, the kernels'
# own text, and a benchmark.
_CALLS = re.compile(
    r"^(async_compile\.wait|class Runner).*?(?=^def get_args|^def benchmark_compiled_module|\Z)",
    re.MULTILINE | re.DOTALL,
)
# In these calls: it may draw random numbers. More is found than draws, never less.
_DRAWS = re.compile(r"seed|rand|bernoulli|dropout|normal_|uniform|exponential|multinomial|poisson")
# It talks to other processes, or does something that must happen once.
_HAPPENS_ONCE = re.compile(r"c10d|with_effects|_print")


# ------------------------------------------------------------------------------ a graph that is run


class NewTensors(list[Any]):
    """Of what a compiled graph returned, one tensor for each storage that is new."""

    __slots__ = ("everything",)
    everything: Any  # all that it returned


class CompiledGraph(OneOperation):
    """An operator: what inductor made of one graph. It is called with the graph's inputs, or with
    one list of them, which it empties as it goes.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.mutated = tuple(graph.mutated_input_idxs)
        self._modules: list[Any] | None = None

    def __str__(self) -> str:
        return "compiled.graph"

    __repr__ = __str__

    def __reduce__(self) -> Any:  # a compiled graph is written to a cache with all its attributes
        return type(None), ()

    @property
    def draws(self) -> bool:
        """Whether it may draw random numbers."""
        return _DRAWS.search(self._calls) is not None

    @property
    def can_run_again(self) -> bool:
        """Whether it does nothing but make its results of its inputs."""
        return (
            bool(self._calls)
            and not self.mutated
            and self._graph.cudagraph_info is None
            and _HAPPENS_ONCE.search(self._calls) is None
        )

    @property
    def _calls(self) -> str:
        found = _CALLS.search(self._graph.source_code or "")
        return found.group() if found else ""

    def empties(self, args: Any) -> bool:
        """Whether it is called with one list, from which it takes out what it has read."""
        return len(args) == 1 and type(args[0]) is list

    def _run(self, *args: Any) -> Any:
        inputs = args[0] if self.empties(args) else list(args)
        given = set(map(_key, inputs))
        with self._telling():
            everything = _run_graph(self._graph, inputs)
        new = NewTensors()
        for tensor in everything:
            if isinstance(tensor, torch.Tensor) and (key := _key(tensor)) not in given:
                given.add(key)
                new.append(tensor)
        new.everything = everything
        return new

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Inside, whoever counts bytes is told of each tensor that the generated code makes."""
        with telling() as ears:
            before = [(module, vars(module).copy()) for module in self._code()] if ears else []
            try:
                for module, names in before:
                    for name, function in names.items():
                        if name.startswith("empty_strided"):
                            setattr(module, name, Telling(function, ears))
                yield
            finally:
                for module, names in before:
                    vars(module).update(names)

    def _code(self) -> list[Any]:
        """The module that was generated for it."""
        if self._modules is None:
            cache = sys.modules["torch._inductor.codecache"].PyCodeCache
            key = self._graph.cache_key
            self._modules = [module for module in cache.modules if module.key == key]
        return self._modules


def _key(tensor: Any) -> int | None:
    """The address of a tensor's storage; of anything else, or of a tensor without one, None."""
    try:
        return storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
    except (RuntimeError, NotImplementedError):
        return None


def _call_graph(graph: Any, inputs: Any) -> Any:
    """In the place of `CompiledFxGraph.__call__`."""
    if _thread.calls:
        _thread.calls[-1].begin_to_listen()
    if not listen.is_heard():
        return _run_graph(graph, inputs)
    operator = vars(graph).get(_REGION)
    if operator is None:
        operator = CompiledGraph(graph)
        setattr(graph, _REGION, operator)
    # In a backward pass what was saved is let go of as soon as it has been read.
    in_backward = graph_task_id() != -1 and type(inputs) is list
    return operator.heard(*((inputs,) if in_backward else inputs)).everything


def _run_graph(graph: Any, inputs: Any) -> Any:
    run = _originals.get("graph") or type(graph).__call__
    return run(graph, inputs)


# --------------------------------------------------------------- a compiled function that is called


class _ThreadCalls(threading.local):
    def __init__(self) -> None:
        self.calls: list[_CompiledCall] = []  # of compiled functions, the outermost first


_thread = _ThreadCalls()
# Whoever is compiled into code that does not begin with a graph: modules, functions.
_not_whole: weakref.WeakSet[Any] = weakref.WeakSet()


class _CompiledCall:
    """One call of a compiled function in a thread that somebody listens to."""

    def __init__(self, frame: types.FrameType) -> None:
        _listen_to_graphs()
        function, context = frame.f_locals["fn"], frame.f_locals["self"]
        self.frame: types.FrameType | None = frame
        self.is_about_to_begin = False  # dynamo has asked what it is to do with frames
        self.subject, self._codes = _traced(function)
        self._stance: Any = None
        self._hooks: list[tuple[Any, Any]] = []
        self._is_off = self._was_off = False
        self.is_eager = (
            not self._codes
            or _dynamo()._stance.stance != "default"
            or not _is_inductor(context.callback)
            or bool(listen.dispatch_modes())
            or self.subject in _not_whole
            or not all(map(_begins_with_graph, self._compiled()))
        )
        if self.is_eager:
            dynamo = _dynamo()
            self._stance, dynamo._stance = dynamo._stance, dynamo.DynamoStance("force_eager")
        elif self._compiled():
            self._stop_listening()

    def _compiled(self) -> list[types.CodeType]:
        """The code that dynamo has made so far."""
        return [entry.code for code in self._codes for entry in _entries_of(code)]

    def callback(self, compiler: Any) -> Any:
        """What dynamo is to call for a frame that it has no code for."""
        if self.is_eager:
            return None

        def convert(frame: Any, *rest: Any, **options: Any) -> Any:
            from torch._dynamo.types import ConvertFrameReturn

            if self.is_eager or frame.f_code not in self._codes:
                return ConvertFrameReturn(apply_to_code=False)
            self._stop_listening()
            found = compiler(frame, *rest, **options)
            if found.guarded_code is None and frame.f_code is not self._codes[-1]:
                return found  # it is passed over, and the next frame is looked at
            if found.guarded_code is not None and _begins_with_graph(found.guarded_code.code):
                return found
            _not_whole.add(self.subject)
            self.is_eager = True
            self.begin_to_listen()
            return ConvertFrameReturn(apply_to_code=False)

        # As dynamo's own do: code is looked up by the compiler that has made it.
        convert._torchdynamo_orig_backend = compiler  # type: ignore[attr-defined]
        return convert

    def _stop_listening(self) -> None:
        if self._is_off:
            return
        self._is_off = self._was_off = True
        listen.switch_off()
        for hooks in _hooks_of_all_modules():
            for number, hook in list(hooks.items()):
                if _is_ours(hook):
                    self._hooks.append((hooks, (number, hook)))
                    del hooks[number]

    def begin_to_listen(self) -> None:
        """From here on operations are heard."""
        if self._is_off:
            self._is_off = False
            listen.switch_on()
            while self._hooks:
                hooks, (number, hook) = self._hooks.pop()
                hooks[number] = hook

    def end(self) -> None:
        """The function has returned."""
        self.begin_to_listen()
        if self._was_off:
            listen.switch_on()  # dynamo has made the thread's keys as they were when it began
        if self._stance is not None:
            _dynamo()._stance = self._stance
        self.frame = None


def called_module() -> torch.nn.Module | None:
    """The module whose compiled forward runs now in this thread."""
    subject = _thread.calls[-1].subject if _thread.calls else None
    return subject if isinstance(subject, torch.nn.Module) else None


def _traced(function: Any) -> tuple[Any, tuple[types.CodeType, ...]]:
    """What dynamo is to compile: whose it is, and the code of the frames that it looks at before it
    finds one to compile; none if something else may run before that.
    """
    owner = getattr(function, "__self__", None)
    whole = getattr(function, "__func__", function)
    if not isinstance(whole, types.FunctionType):
        return function, ()
    if whole not in _MODULE_CALLS or not isinstance(owner, torch.nn.Module):
        return (whole if owner is None else owner), (whole.__code__,)
    forward = getattr(owner.forward, "__func__", owner.forward)
    if not isinstance(forward, types.FunctionType) or _has_hooks(owner):
        return owner, ()
    calls = (torch.nn.Module.__call__.__code__, torch.nn.Module._call_impl.__code__)
    return owner, (*calls, forward.__code__)


_MODULE_CALLS = (torch.nn.Module.__call__, torch.nn.Module._call_impl)


def _has_hooks(module: torch.nn.Module) -> bool:
    """Hooks of somebody else's that run around the module's forward."""
    own = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    if any(own) or module._backward_pre_hooks:
        return True
    return _has_hook_of_others()


def _hooks_of_all_modules() -> tuple[dict[int, Any], ...]:
    return (
        torch_modules._global_forward_pre_hooks,
        torch_modules._global_forward_hooks,
        torch_modules._global_backward_hooks,
        torch_modules._global_backward_pre_hooks,
    )


def _is_inductor(callback: Any) -> bool:
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    return wrapper is not None and isinstance(callback, wrapper)


def _begins_with_graph(code: types.CodeType) -> bool:
    """Dynamo's code for a frame calls a graph before anything else, if it calls one at all."""
    return any(name.startswith("__compiled_fn") for name in code.co_names)


def is_compiled(model: torch.nn.Module, loss_fn: Any = None) -> bool:
    """Whether torch.compile was called on a model, a part of it, or the function around it."""
    if hasattr(loss_fn, "_torchdynamo_orig_callable"):
        return True
    return any(
        hasattr(module, "_torchdynamo_orig_callable") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def is_made_inside(loss: torch.Tensor) -> bool:
    """Whether a loss comes out of a compiled graph, but for arithmetic with numbers after it."""
    node: Any = loss.grad_fn
    while node is not None and node.name() != "CompiledFunctionBackward":
        before = [function for function, _ in node.next_functions if function is not None]
        node = before[0] if len(before) == 1 else None
    return node is not None


@functools.cache
def _dynamo() -> Any:
    # takes a second, which the first optimizer has spent before
    import torch._dynamo.eval_frame as dynamo

    return dynamo


# ------------------------------------------------------------------------------------------ patches

_originals: dict[str, Any] = {}


def _set_eval_frame(callback: Any) -> Any:
    """In the place of dynamo's: the first thing that a compiled function does is to switch dynamo
    off.
    """
    if callback is None and listen.is_heard():
        frame = sys._getframe(1)
        calls = _thread.calls
        is_new = not calls or calls[-1].frame is not frame
        if is_new and frame.f_code.co_name == "compile_wrapper" and "fn" in frame.f_locals:
            calls.append(_CompiledCall(frame))
    return _originals["set_eval_frame"](callback)


def _callback_from_stance(callback: Any) -> Any:
    found = _originals["_callback_from_stance"](callback)
    call = _call_of(sys._getframe(1))
    if call is None:
        return found
    call.is_about_to_begin = True
    return found if found in (None, False) else call.callback(found)


def _maybe_set_eval_frame(callback: Any) -> Any:
    """Called twice by a compiled function: before it runs, and when it has."""
    call = _call_of(sys._getframe(1))
    if call is not None:
        if not call.is_about_to_begin:
            _thread.calls.pop()
            call.end()
        call.is_about_to_begin = False
    return _originals["_maybe_set_eval_frame"](callback)


def _call_of(frame: types.FrameType) -> _CompiledCall | None:
    calls = _thread.calls
    return calls[-1] if calls and calls[-1].frame is frame else None


def _calls_of_thread() -> Callable[[], None]:
    count = len(_thread.calls)

    def end_later_ones() -> None:
        while len(_thread.calls) > count:
            _thread.calls.pop().end()

    return end_later_ones


listen.thread_settings.append(_calls_of_thread)


def listen_to_compiled_functions() -> None:
    """From now on compiled functions are heard, in threads in which somebody listens."""
    if _originals:
        return
    dynamo = _dynamo()
    _originals.update(
        set_eval_frame=dynamo.set_eval_frame,
        _callback_from_stance=dynamo._callback_from_stance,
        _maybe_set_eval_frame=dynamo._maybe_set_eval_frame,
        has_hook=torch_modules._has_any_global_hook,
    )
    dynamo.set_eval_frame = _set_eval_frame
    dynamo._callback_from_stance = _callback_from_stance
    dynamo._maybe_set_eval_frame = _maybe_set_eval_frame
    torch_modules._has_any_global_hook = _has_hook_of_others
    if "torch._inductor.output_code" in sys.modules:  # else nothing is compiled yet
        _listen_to_graphs()


def _listen_to_graphs() -> None:
    import torch._inductor.output_code as inductor

    if _originals and "graph" not in _originals:
        _originals["graph"] = inductor.CompiledFxGraph.__call__
        inductor.CompiledFxGraph.__call__ = _call_graph  # type: ignore[method-assign, assignment]


def leave_compiled_functions_alone() -> None:
    """Undo it."""
    if not _originals:
        return
    dynamo = _dynamo()
    dynamo.set_eval_frame = _originals["set_eval_frame"]
    dynamo._callback_from_stance = _originals["_callback_from_stance"]
    dynamo._maybe_set_eval_frame = _originals["_maybe_set_eval_frame"]
    if "graph" in _originals:
        inductor = sys.modules["torch._inductor.output_code"]
        inductor.CompiledFxGraph.__call__ = _originals["graph"]
    torch_modules._has_any_global_hook = _originals["has_hook"]
    _originals.clear()


def _is_ours(hook: Any) -> bool:
    """A hook of gradfit's on all modules, which compiled functions must not learn of."""
    return str(getattr(hook, "__module__", "")).startswith("gradfit.")


def _has_hook_of_others() -> bool:
    return not all(_is_ours(hook) for each in _hooks_of_all_modules() for hook in each.values())
