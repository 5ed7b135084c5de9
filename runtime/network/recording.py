"""What ``torch.export`` leaves out of a program, or puts elsewhere: recorded, or refused.

It traces through the ``forward`` of an ``autograd.Function``, so that its ``backward`` is lost, and
does not see ``torch.inference_mode``, ``.data`` and hooks on tensors. Operations under another grad
mode, or under ``torch.autocast``, become a program within the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dni_runtime.errors import SpecError

_STANDARD = frozenset(vars(nn.Module()))
_NUMBERS = (int, float, complex, str, torch.dtype, torch.device, torch.SymInt, type(None))
_REFUSED = {
    Tensor.register_hook: "registers a hook on a tensor",
    Tensor.backward: "computes gradients",
    torch.autograd.grad: "computes gradients",
    torch.autograd.backward: "computes gradients",
}


class _FunctionOperator(HigherOrderOperator):
    """An ``autograd.Function`` as one operation."""

    def __init__(self, function: Any) -> None:
        super().__init__(function.__name__)  # type: ignore[no-untyped-call]  # of torch
        self.function = function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args)


_applied = lru_cache(maxsize=None)(_FunctionOperator)


class _Replacements(TorchFunctionMode):
    """Replaces, or refuses, what a traced program does not have."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _REFUSED:
            raise SpecError(f"'forward' {_REFUSED[func]}, which a traced program cannot do")
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]  # a slot
            return args[0].detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]  # a slot
            return args[0].detach().copy_(args[1])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Have all that ``forward`` does recorded, or refused, while it is traced."""
    from torch.fx.experimental.proxy_tensor import (  # these take a while to import
        disable_proxy_modes_tracing,
        get_proxy_mode,
        track_tensor_tree,
    )

    applied = vars(torch.autograd.Function)["apply"]  # Python's or C's, by the version of torch

    def plain(function: Any, *args: Any, **kwargs: Any) -> Any:
        return applied.__get__(None, function)(*args, **kwargs)

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        proxy_mode = get_proxy_mode()
        if proxy_mode is None:
            return plain(function, *args, **kwargs)
        if function is torch.utils.checkpoint.CheckpointFunction:
            return args[0](*args[2:])
        for argument in pytree.tree_leaves(args):
            if not isinstance(argument, (Tensor, *_NUMBERS)):
                raise SpecError(
                    f"the autograd.Function {function.__name__} takes a {type(argument).__name__}: "
                    "one that takes tensors and numbers alone can be traced"
                )
        with disable_proxy_modes_tracing():
            outputs = plain(function, *args, **kwargs)
        tracer: Any = proxy_mode.tracer
        inputs = pytree.tree_map(tracer.unwrap_proxy, args)
        proxy = tracer.create_proxy("call_function", _applied(function), inputs, {})
        return track_tensor_tree(outputs, proxy, constant=None, tracer=tracer)

    def enter(self: Any) -> None:
        self.before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not self.mode)

    def leave(self: Any, *error: object) -> None:
        torch._C._set_grad_enabled(self.before)

    replaced: list[tuple[Any, str, Any]] = [
        (torch.autograd.Function, "apply", classmethod(apply)),
        (torch.inference_mode, "__enter__", enter),
        (torch.inference_mode, "__exit__", leave),
        # It compares a mask with others, to choose a kernel.
        (nn.modules.transformer, "_detect_is_causal_mask", lambda mask, known, *_: bool(known)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        stack.enter_context(_Replacements())
        yield


def inline(program: fx.GraphModule) -> fx.Graph:
    """Return a program's operations, with those of the programs within it in their places.

    ``meta["modes"]`` of an operation has the contexts in which it runs.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or "wrap_with" not in getattr(node.target, "__name__", ""):
            continue
        body = next(operand for operand in node.all_input_nodes if operand.op == "get_attr")
        at = node.args.index(body)
        context = torch.set_grad_enabled if at == 1 else torch.autocast
        modes = (partial(context, *node.args[:at]),)
        inner = inline(getattr(program, str(body.target)))
        new: dict[fx.Node, Any] = {}
        arguments = iter(node.args[at + 1 :])
        with graph.inserting_before(node):
            for operation in inner.nodes:
                if operation.op == "placeholder":
                    new[operation] = next(arguments)
                elif operation.op == "output":
                    outputs = fx.node.map_arg(operation.args[0], new.__getitem__)
                else:
                    new[operation] = graph.node_copy(operation, new.__getitem__)
                    new[operation].meta["modes"] = modes + operation.meta.get("modes", ())
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)
    return graph


def assign_early(graph: fx.Graph, buffer: fx.Node) -> None:
    """Let a buffer that ``forward`` replaces, by a last copy, change as soon as its value is there.

    What reads the buffer reads what it was.
    """
    users: list[Any] = sorted(buffer.users)
    readers, copy = users[:-1], users[-1]
    with graph.inserting_before(readers[0] if readers else copy):
        before = graph.call_function(torch.ops.aten.clone.default, (buffer,))
        before.meta = {**(readers or [copy])[0].meta, "val": buffer.meta["val"].clone()}
    buffer.replace_all_uses_with(before, lambda user: user not in (before, copy))
    value = copy.args[1].args[0]
    for node in (copy, copy.args[1]):  # that is detached
        value.append(node)
        node.meta["nn_module_stack"] = value.meta.get("nn_module_stack", {})


def mode_on(device: str, mode: partial[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context for a device: autocast was traced on the CPU, by ``x.device.type`` too."""
    if mode.func is torch.autocast and mode.args[0] == "cpu" and device != "meta":
        return torch.autocast(device, *mode.args[1:])
    return cast("contextlib.AbstractContextManager[Any]", mode())


def under(operation: Callable[..., Any], modes: tuple[partial[Any], ...]) -> Any:
    """Return an operation that runs in some contexts, on its operands' device."""

    @wraps(operation, assigned=("__name__",), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode_on(device, mode))
            return operation(*args, **kwargs)

    return run


def plain_attributes(network: nn.Module) -> dict[str, Any]:
    """Return what a network has beside parameters and buffers, by name."""
    return {
        f"{path}.{name}{pytree.keystr(keys)}".removeprefix("."): leaf
        for path, module in network.named_modules()
        for name, value in vars(module).items()
        if name not in _STANDARD
        for keys, leaf in pytree.tree_flatten_with_path(value)[0]
    }
