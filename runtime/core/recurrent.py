"""A recurrent layer with a state carried between batches: truncated backpropagation in time.

Jaderberg et al. 2016 (arXiv:1608.05343), sec. 2 (synthetic gradients for recurrent networks) and
sec. 3.1: a synthesizer predicts the gradient that the future would send back.

Shape suffixes: B samples, T steps of a batch, C features of a step, H hidden units, S numbers of
a sample's state: H for each layer of the cell, and as many again for the cell values of an LSTM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, cast

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from dni_runtime.core.synthesizers import Synthesizer, build_synthesizer
from dni_runtime.core.training import build_optimizer
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from dni_runtime.spec.load import explain_details
from dni_runtime.spec.named import Frozen

CELLS: dict[str, type[nn.LSTM | nn.GRU | nn.RNN]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class FutureOptions(Frozen):
    """Options of predicting the gradient from beyond a batch's last step."""

    synthesizer: Choice = Choice(name="linear")  # it sees the state
    optimizer: Choice = Choice(name="Adam", args={"lr": 0.001})
    # Factor on the predicted gradient. The target of a prediction contains the next prediction:
    # at 1 errors add up over batches.
    scale: float = Field(default=0.3, gt=0)


class _RecurrentOptions(Frozen):
    cell: Literal["LSTM", "GRU", "RNN"]
    num_layers: int = Field(ge=1)
    synthetic: FutureOptions | None


class Recurrent(nn.Module):
    """``torch.nn.LSTM``, ``GRU`` or ``RNN`` from (B, T, C) to (B, T, H), with the state carried on.

    In training, sample *b* of a batch continues where sample *b* of the previous batch ended.
    Gradients end at the batch's first step. With ``synthetic``, the gradient of all later losses
    with respect to the state after the last step is predicted from that state and added in the
    backward pass. The synthesizer learns at the next forward pass, from the next batch's gradient
    at its initial state, which contains that batch's own prediction.

    A pass without gradients (evaluation) has a state of its own, which starts with zeros at the
    first such batch after a training batch, or after :meth:`end_evaluation`. A
    batch of another size starts with zeros.
    """

    state: Tensor  # after the last training batch, (B, S); (0, S) before the first
    start: Tensor | None = None  # of the newest training pass, if its gradient is wanted
    _passing: Tensor | None = None

    def __init__(
        self,
        *,
        cell: str,
        input_size: int,  # C
        hidden_size: int,  # H
        num_layers: int = 1,
        dropout: float = 0.0,  # between the cell's layers
        carry: bool = True,  # else each batch starts with zeros
        synthetic: bool | dict[str, Any] = False,  # a mapping is :class:`FutureOptions`
    ) -> None:
        super().__init__()
        options = _checked(cell, num_layers, synthetic)
        if options.synthetic is not None and not carry:
            raise ValueError("'synthetic' needs 'carry: true'")
        if dropout and num_layers == 1:
            raise ValueError(
                "'dropout' is between the cell's layers: it needs 'num_layers' above 1"
            )
        self.cell = CELLS[cell](
            input_size, hidden_size, num_layers, batch_first=True, dropout=dropout
        )
        self.carry = carry
        self._parts = 2 if cell == "LSTM" else 1
        size = self._parts * num_layers * hidden_size
        if carry:
            self.register_buffer("state", torch.zeros(0, size))
        self.synthesizer: Synthesizer | None = None
        if options.synthetic is not None:
            self._add_synthesizer(options.synthetic, size)
        self._boundary = 0
        self._lessons: dict[int, tuple[Tensor, Tensor]] = {}

    def _add_synthesizer(self, options: FutureOptions, size: int) -> None:
        # One token of S features: its synthesizers normalise over features, not over the batch.
        activation = TensorSpec(shape=(1, size), dtype="float32")
        try:
            self.synthesizer = build_synthesizer(
                options.synthesizer, activation, None, None, ("synthetic", "synthesizer")
            )
            self.optimizer = build_optimizer(
                options.optimizer, self.synthesizer.parameters(), ("synthetic", "optimizer")
            )
        except SpecError as error:
            raise ValueError(_located(error.location, error.message, error.hint)) from None
        self.scale = options.scale
        # The module's own optimizer does not train it.
        self.synthesizer.requires_grad_(False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Continue from the previous state; see the class."""
        if x_BTC.dim() != 3:  # torch's cells would take a matrix for one sequence
            raise ValueError(f"a sequence of vectors (B, T, C) is needed, not {x_BTC.dim() - 1}-D")
        if not self.carry:
            return cast("Tensor", self.cell(x_BTC)[0])
        if not (self.training and torch.is_grad_enabled()):
            before_BS = self.state[:0] if self._passing is None else self._passing
            h_BTH, self._passing = self._run(x_BTC, _fitting(before_BS, x_BTC))
            return h_BTH
        self._passing = None
        self.learn()
        before_BS = _fitting(self.state, x_BTC)
        trained = self.cell.weight_hh_l0.requires_grad
        if self.synthesizer is None or not trained:
            h_BTH, after_BS = self._run(x_BTC, before_BS)
            self.state = after_BS.detach()
            return h_BTH
        start_BS = self.start = before_BS.detach().requires_grad_()
        if before_BS is self.state:
            note = partial(self._note, self._boundary, before_BS)
            start_BS.register_hook(note)  # type: ignore[no-untyped-call]  # torch's has no types
        h_BTH, after_BS = self._run(x_BTC, start_BS)
        self.state = after_BS.detach()
        self._boundary += 1
        g_BS = self._predict(self.state) * (self.scale / len(x_BTC))
        return cast("Tensor", _Future.apply(h_BTH, after_BS, g_BS))  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Start the next training batch with zeros, as another sequence.

        No later loss depends on the last state then, which the synthesizer learns.
        """
        if not self.carry:
            return
        if self.synthesizer is not None and len(self.state):
            self._lessons[self._boundary] = (self.state, torch.zeros_like(self.state))
        self.state = self.state[:0]
        self._boundary += 1

    def end_evaluation(self) -> None:
        """Start the next pass without gradients with zeros."""
        self._passing = None

    def take_state(self, other: Recurrent) -> None:
        """Take over the state of another layer of the same kind."""
        if self.carry:
            self.state, self._passing = other.state, other._passing

    def learn(self) -> None:
        """Teach the synthesizer the gradients that have come since the last forward pass."""
        lessons, self._lessons = self._lessons, {}
        if self.synthesizer is None or not lessons:
            return
        self.synthesizer.requires_grad_(True)
        with torch.enable_grad(), _full_precision(self.state):
            for s_BS, g_BS in lessons.values():
                lesson = self.synthesizer.lesson(self._seen(s_BS), s_BS[:0], g_BS[:, None])
                lesson.loss.backward()  # type: ignore[no-untyped-call]  # torch's has no types
                self.optimizer.step()
                # An optimizer of the whole layer must not use these gradients.
                self.optimizer.zero_grad(set_to_none=True)
        self.synthesizer.requires_grad_(False)

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return the synthesizer's optimizer, whose state belongs in checkpoints."""
        return {} if self.synthesizer is None else {"synthesizer": self.optimizer}

    def _run(self, x_BTC: Tensor, before_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and the state after the last step."""
        cell = self.cell
        split = before_BS.view(-1, self._parts, cell.num_layers, cell.hidden_size)
        parts = [part.contiguous() for part in split.permute(1, 2, 0, 3)]  # each (layers, B, H)
        exact = contextlib.nullcontext() if _halves(x_BTC) else _full_precision(x_BTC)
        with exact:
            h_BTH, after = cell(x_BTC, tuple(parts) if self._parts == 2 else parts[0])
        after = torch.stack(after) if self._parts == 2 else after[None]
        after_BS = after.permute(2, 0, 1, 3).reshape(before_BS.shape)
        return h_BTH, after_BS.to(before_BS.dtype)

    @torch.no_grad()
    def _predict(self, s_BS: Tensor) -> Tensor:
        """Predict the per-sample gradient of later losses with respect to the state."""
        assert self.synthesizer is not None
        with _full_precision(s_BS):
            g_BS: Tensor = self.synthesizer(self._seen(s_BS), None)[:, 0]
            return g_BS

    def _seen(self, s_BS: Tensor) -> Tensor:
        """Return the state as the synthesizer sees it: as one token of S features.

        An LSTM's cell values go through tanh, as for its own output gate: a value that only adds up
        over a long stream would dominate all others.
        """
        if self._parts == 2:
            h_BS, c_BS = s_BS.chunk(2, 1)
            s_BS = torch.cat((h_BS, c_BS.tanh()), 1)
        return s_BS[:, None]

    def _note(self, boundary: int, s_BS: Tensor, g_BS: Tensor) -> None:
        """Note the gradient at the initial state; the newest of several counts.

        The synthesizer is not taught here: this runs inside autograd.
        """
        self._lessons[boundary] = (s_BS, g_BS.detach() * len(g_BS))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.learn()  # else the next forward pass would do so first
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        name = f"{prefix}state"
        if self.carry:
            self._lessons.clear()
            self._passing = None
            if name in state_dict:  # of as many samples as the last batch had
                self.state = self.state.new_zeros(len(state_dict[name]), self.state.shape[1])
        else:  # only the weights of a layer that carries its state
            for key in list(state_dict):
                if key == name or key.startswith(f"{prefix}synthesizer."):
                    del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _Future(torch.autograd.Function):
    """``h`` as it is, with ``g`` as the gradient with respect to the state ``s``."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, s: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g_h: Tensor) -> tuple[Tensor, Tensor, None]:
        (g,) = ctx.saved_tensors
        return g_h, g, None


def _full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    if tensor.is_meta:  # shapes alone: torch has no autocast there
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def _halves(x_BTC: Tensor) -> bool:
    """Whether the device has bfloat16 for an LSTM: oneDNN refuses it on CPUs without AVX-512."""
    return x_BTC.device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _fitting(state_BS: Tensor, x_BTC: Tensor) -> Tensor:
    """Return the state, or zeros if it is of another batch size."""
    if len(state_BS) == len(x_BTC):
        return state_BS
    return state_BS.new_zeros(len(x_BTC), state_BS.shape[1])


def _checked(cell: str, num_layers: int, synthetic: bool | dict[str, Any]) -> _RecurrentOptions:
    if not isinstance(synthetic, bool | dict):
        raise ValueError(f"synthetic: {synthetic!r} is not true, false or a mapping of options")
    options = {
        "cell": cell,
        "num_layers": num_layers,
        "synthetic": {} if synthetic is True else synthetic or None,
    }
    try:
        return _RecurrentOptions.model_validate(options)
    except ValidationError as error:
        raise ValueError(_located(*explain_details(error, _RecurrentOptions))) from None


def _located(location: Iterable[str | int], message: str, hint: str | None) -> str:
    """Format the location in the layer's keywords, the message and the hint as one line."""
    return f"{'.'.join(map(str, location))}: {message}{f' ({hint})' if hint else ''}"
