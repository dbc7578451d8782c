"""Adapters over linear layers whose frozen weight bitsandbytes keeps in few bits: in 4 (Dettmers et al., 2023, "QLoRA",
section 3), or in 8 (Dettmers et al., 2022, "LLM.int8()", section 2.1).

    from forebay.integrations.bitsandbytes import stream

    stream(model)  # before forebay.prepare; ForebayTrainer does it by itself

The layers of bitsandbytes hang their weight on the autograd node itself, where saved-tensor hooks do not look: a slot
would stay occupied from the forward of a block to its backward. The layers here save it as autograd has it saved, and
call the same ops with the same arguments. Codes stream with their block; their scales are buffers, which stay on the
device: in 4 bits an eighth of the codes' bytes, or a thirty-second with double quantisation, in 8 bits 4 bytes a row.

In evaluation on CPUs with AVX-512 BF16, bitsandbytes packs weights of 4 bits anew for a kernel of its own; here they
stay as they are. In 8 bits it computes evaluations everywhere, and on GPUs training too, from activations in 8 bits;
so do the layers here.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.nn import functional as F

from forebay.errors import ModelError
from forebay.integrations import missing
from forebay.runtime.hooks import is_prepared

try:
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
except ImportError as error:
    raise missing("qlora", error) from error

__all__ = ["StreamedLinear4bit", "StreamedLinear8bit", "stream"]


class _Form(NamedTuple):
    """How codes are to be read: elements of a scale, ``nf4`` or ``fp4``, the weight's shape and its own dtype, and,
    with double quantisation, how many scales share one of their own (0: they are as they are)."""

    blocksize: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nested: int

    def weight(self, codes: torch.Tensor, scales: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """The weight as ``dtype``: what bitsandbytes' ``dequantize_4bit`` computes."""
        scale = scales[0]
        if self.nested:
            of_scales, table, offset = scales[1:]
            scale = torch.ops.bitsandbytes.dequantize_blockwise.default(
                scale, of_scales, table, self.nested, torch.float32
            )
            scale = scale + offset
        made: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            codes, scale, self.blocksize, self.kind, self.shape, dtype
        )
        return made


class _Product(torch.autograd.Function):
    """``x @ weight.T + bias`` for a frozen weight in 4 bits; its codes are what is saved for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, form: _Form, codes: torch.Tensor, *scales: torch.Tensor
    ) -> torch.Tensor:
        ctx.form = form
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(codes, *scales)
        return F.linear(x, form.weight(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        codes, *scales = ctx.saved_tensors
        form: _Form = ctx.form
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = torch.matmul(gradient, form.weight(codes, tuple(scales), form.dtype).to(gradient.dtype))
        if ctx.needs_input_grad[1]:
            of_bias = gradient.flatten(end_dim=-2).sum(0, dtype=ctx.bias_dtype)
        return (of_x, of_bias, None, None, *(None for _ in scales))


@final
class StreamedLinear4bit(Linear4bit):
    """A ``Linear4bit`` that lets go of its weight between forward and backward. Made by ``stream``."""

    form: _Form
    scales: tuple[str, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``bitsandbytes.nn.Linear4bit.forward``, with the same bits."""
        if not self.compute_type_is_set:
            self.set_compute_type(x)  # type: ignore[no-untyped-call]
            self.compute_type_is_set = True
        given = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        scales = [self.get_buffer(name) for name in self.scales]
        # A view is a plain tensor, which saved-tensor hooks know; the parameter itself is of a class of its own.
        made: torch.Tensor = _Product.apply(x, bias, self.form, self.weight.view(-1, 1), *scales)  # type: ignore[no-untyped-call]
        return made.to(given)


def _of_codes(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight (outputs, inputs) as ``dtype`` whose rows are ``codes`` of 8 bits with a ``scale`` (outputs) each."""
    return codes.to(dtype, copy=True).mul_(scale.unsqueeze(1).mul(1.0 / 127.0))


def _of_coded(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """``x @ weight.T + bias`` with ``x`` in 8 bits too, but for the columns of it that reach ``threshold`` somewhere
    (0: all of it). What ``bitsandbytes.MatMul8bitLt`` computes."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() == 3 else x
    ops = torch.ops.bitsandbytes
    coded, scales, outliers = ops.int8_vectorwise_quant.default(rows.to(torch.float16), threshold)
    if threshold > 0.0:
        made: torch.Tensor = ops.int8_mixed_scaled_mm.default(rows, coded, codes, scales, scale, outliers, bias)[0]
    else:
        made = ops.int8_scaled_mm.default(coded, codes, scales, scale, bias=bias, dtype=rows.dtype)
    return made.reshape(*x.shape[:-1], codes.shape[0])


class _CodedProduct(torch.autograd.Function):
    """``x @ weight.T + bias`` for a frozen weight in 8 bits; its codes are what is saved for backward. With
    ``threshold`` None from the weight as it is, else as ``_of_coded`` has it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        threshold: float | None,
        codes: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(codes, scale)
        if threshold is None:
            return F.linear(x, _of_codes(codes, scale, x.dtype), bias)
        return _of_coded(x, codes, scale, bias, threshold)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        codes, scale = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[1]:
            of_bias = gradient.sum(0, dtype=ctx.bias_dtype)  # autograd adds up the other rows
        if ctx.needs_input_grad[0]:
            rows = gradient.reshape(-1, gradient.shape[-1]).contiguous() if gradient.dim() == 3 else gradient
            of_rows = torch.matmul(rows.to(ctx.dtype), _of_codes(codes, scale, ctx.dtype))
            of_x = of_rows.view(*gradient.shape[:-1], codes.shape[1])
        return of_x, of_bias, None, None, None


@final
class StreamedLinear8bit(Linear8bitLt):
    """A ``Linear8bitLt`` that lets go of its weight between forward and backward. Made by ``stream``."""

    scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``bitsandbytes.nn.Linear8bitLt.forward``, with the same bits."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        # bitsandbytes trains on CPUs from the weight as it is, for want of a fast product of codes.
        threshold = None if self.training and x.device.type == "cpu" else self.state.threshold
        codes = self.weight.view_as(self.weight)  # a plain tensor: see StreamedLinear4bit
        made: torch.Tensor = _CodedProduct.apply(x, bias, threshold, codes, self.scale)  # type: ignore[no-untyped-call]
        return made


def stream(model: nn.Module) -> tuple[str, ...]:
    """Has every ``Linear4bit`` and ``Linear8bitLt`` of ``model`` let go of its weight between forward and backward, in
    place; the parameters are the same objects. Returns the names of these layers.

    Raises ``ModelError`` for a model that is prepared, and for a layer that is not quantised yet, of which 16 bits are
    trained, or whose weight was not given as ``(out_features, in_features)``; the model is then as it was.
    """
    layers = [(name, module) for name, module in model.named_modules() if _is_plain(module)]
    if layers and is_prepared(model):
        raise ModelError("this model is prepared; call forebay.integrations.bitsandbytes.stream(model) before")
    forms = [_form(name, layer) if isinstance(layer, Linear4bit) else _scale(name, layer) for name, layer in layers]
    for (_, layer), form in zip(layers, forms, strict=True):
        # As FSDP2 does: the module stays the object that others, its adapter among them, know.
        if isinstance(form, _Form):
            _let_go_of_4_bits(layer, form)
        else:
            _let_go_of_8_bits(layer, form)
    return tuple(name for name, _ in layers)


def _is_plain(module: nn.Module) -> bool:
    kinds = (Linear4bit, Linear8bitLt)
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def _let_go_of_4_bits(layer: Any, form: _Form) -> None:
    state = layer.weight.quant_state
    scales = {"scale": state.absmax}
    if form.nested:
        scales |= {"scale_scale": state.state2.absmax, "scale_table": state.state2.code, "scale_offset": state.offset}
    for name, tensor in scales.items():
        # The tensors of the quantisation's own record: its state dict has them already, and they move together.
        layer.register_buffer(name, tensor, persistent=False)
    layer.__class__ = StreamedLinear4bit
    layer.form, layer.scales = form, tuple(scales)


def _let_go_of_8_bits(layer: Any, scale: torch.Tensor) -> None:
    # Where the state dict of bitsandbytes looks for the scale. The codes are the weight itself, and nobody else's.
    layer.weight.CB, layer.weight.SCB = None, scale
    layer.state.CB = layer.state.SCB = None
    layer.register_buffer("scale", scale, persistent=False)
    layer.__class__ = StreamedLinear8bit


def _scale(name: str, layer: Any) -> torch.Tensor:
    """The scales of a layer of 8 bits, wherever bitsandbytes has them: in another place after a first forward."""
    if layer.state.has_fp16_weights:
        raise ModelError(
            f"{name} trains 16 bits that it quantises in every forward (has_fp16_weights); train adapters over a model "
            f"that is loaded in 8 bits (load_in_8bit)"
        )
    on_weight = vars(layer.weight).get("SCB")
    scale: torch.Tensor | None = layer.state.SCB if on_weight is None else on_weight
    if scale is None:
        raise _not_quantised(name)
    return scale


def _not_quantised(name: str) -> ModelError:
    return ModelError(f"{name} is not quantised yet; load the model with its quantization_config, or move it once")


def _form(name: str, layer: Any) -> _Form:
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        raise _not_quantised(name)
    if tuple(state.shape) != (layer.out_features, layer.in_features):
        raise ModelError(
            f"{name} was quantised from a weight of shape {tuple(state.shape)}, and it has {layer.out_features} "
            f"outputs and {layer.in_features} inputs; quantise it from (out_features, in_features)"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError(f"{name} was packed anew by an evaluation on this CPU; prepare the model before evaluating it")
    nested = state.state2.blocksize if state.nested else 0
    return _Form(state.blocksize, state.quant_type, tuple(state.shape), state.dtype, nested)
