"""Applies a plan to a live model: block streaming, landed gradients, updates, measurement.

Copies of a parameter, and whose memory they use
    *home*      the block's parameters between their uses: in a host arena, or in a disk file.
    *slot*      a device buffer through which blocks pass; ``param.data`` is a view of it while the block computes.
    *stand-in*  what ``param.data`` is otherwise: one NaN, expanded to the parameter's shape.
    *master*    fp32 copy of a 16-bit parameter, part of the optimizer state.
Copies of a gradient
    *device*    what autograd makes; freed as soon as it has landed.
    *landed*    the bytes in the host's gradient arena; ``param.grad`` is a ``LandedGradient`` that stands for them.
Blocks
    *resident*  parameters, gradients and states stay on the device; autograd and torch see ordinary tensors.
    *dedicated* parameters keep a slot of their own, gradients and states are on the host or on disk.
    *streamed*  parameters pass through shared slots.
"""
