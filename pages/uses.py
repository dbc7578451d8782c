"""When to use a policy, in a sentence or two: what its page says beside what its planner's docstring does."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["USES"]

USES: Mapping[str, str] = MappingProxyType(
    {
        # Simple ones.
        "auto": "Always, unless you want to know what another policy would come to. It weighs activations, parameters,"
        " gradients, states and updates against each other; all other policies leave some of these alone.",
        "keep": "To see what activations cost: nothing is computed again and none moves, so what does not fit has to be"
        " parameters and states.",
        "chen": "Where you know gradient checkpointing and want the same, with parameters and states wherever there is"
        " room for them.",
        "offload-all": "Where the link is fast and computation dear, or to see what `save_on_cpu` would come to if its"
        " copies came back ahead of backward.",
        "resident": "To know whether the model fits as it is, and as the measure of every other policy: it is plain"
        " PyTorch.",
        "recompute": "To know whether gradient checkpointing alone is enough, with everything else on the device.",
        "stream": "For the least device memory without computing anything twice and without moving activations, and as"
        " the measure of what streaming costs.",
        "stream-recompute": "For the least device memory that any plan takes without moving activations.",
        # Parameters, gradients and states.
        "l2l": "Where a layer or two is all that there is room for. It computes every layer again, which"
        " `zero-infinity` does only where it has to.",
        "zero-offload": "Where 16-bit parameters and activations fit on the device and gradients and states do not: the"
        " fewest bytes over the link of all ways to leave fp32 on the host.",
        "zero-infinity": "Where not even parameters fit on the device, and states may not fit on the host.",
        "zero-offload-delayed": "Where the update on the host is what the step waits for and a loss that lags by a step"
        " is acceptable: other numbers than those of plain PyTorch.",
        "patrickstar": "To see what Belady's rule alone comes to. It fetches when it is asked, so that nothing hides;"
        " `angel-ptm` is the same with fetches ahead.",
        "moesys": "For mixtures of experts of which the dense part fits: experts come from the host or from disk.",
        "harmony": "For several micro-batches a step over a slow link: each layer crosses it once for all of them, and"
        " is updated as soon as it can be.",
        "stronghold": "Where the host is large and computation is long enough to hide transfers: it finds the least"
        " window that does, and leaves the rest of the device to activations.",
        "elixir": "Where much of the model fits: it finds how many blocks stay with their states, and how many with"
        " their parameters alone.",
        "mobius": "For several micro-batches a step where more layers than two fit, so that transfers hide better than"
        " under `harmony`.",
        "angel-ptm": "Where all room that activations leave should go to parameters, filled as early as can be; it uses"
        " the disk.",
        "angel-ptm-lock-free": "Where states on disk are what the step waits for and a loss that lags by some steps is"
        " acceptable: other numbers than those of plain PyTorch.",
        "smart-infinity": "Where drives compute, or where host memory is short of states: these stay on disk and are"
        " updated there.",
        "smart-infinity-compressed": "For fine-tuning over drives that compute, where gradients are what the link"
        " carries: other numbers than those of plain PyTorch.",
        "lohan": "Where model states are on drives and the host has room for activations: it swaps as many of these as"
        " is fastest.",
        "hydra": 'For several models on one device: `forebay.prepare_several(policy="hydra")`.',
        "tmo": "For data-parallel training over devices whose links end on one channel, simulated: `--devices`.",
        # Activations.
        "vdnn-all": "For convolutional networks on large images, whose copies hide under convolutions; it leaves the"
        " least on the device of all that compute nothing again.",
        "vdnn-conv": "As `vdnn-all`, where only what products read is worth its copy.",
        "vdnn-dyn": "As `vdnn-all`, where you do not know which of its ways is fastest.",
        "superneurons": "For convolutional networks, in which cheap layers hold much: these run again, and products"
        " move only if that is not enough.",
        "rotor": "For chains of unequal blocks without room on the host: the fewest seconds computed again.",
        "capuchin": "Where copies and computation are both worth weighing, tensor by tensor, in little time to plan.",
        "checkmate": "Where blocks are large and which of their ops run again matters, and some seconds of planning do"
        " not: the answer comes with how far from the optimum it can be.",
        "autotm": "Where nothing should be computed again and which tensors move is worth an integer programme.",
        "swapadvisor": "Where nothing should be computed again and tensors differ much in size.",
        "joins": "For networks in which chains of blocks meet (Siamese, cross-modal), where `rotor` sees only one"
        " chain.",
        "tsplit": "Where one op needs far more memory than the others, as in convolutional networks at large batches:"
        " it frees at that op what costs the fewest seconds a byte, and no more of a tensor than it has to.",
        "flashneuron": "Where the disk, and not the host, has room for activations, and batches are large enough to"
        " hide its writes.",
        "pofo": "For chains of blocks over a link that is fast enough for some of them: which are computed again and"
        " which are offloaded is decided together.",
        "selective": "For transformers whose attention is written out op by op: its scores are most of the bytes and"
        " little of the work.",
        "rockmate": "For chains of blocks without room on the host, where parts of a block are worth keeping: never"
        " slower than `rotor`.",
        "moccasin": "As `checkmate`, with CP-SAT (`pip install 'forebay[cpsat]'`), which proves optima of small graphs"
        " sooner.",
        "dtr": "Where copies cost more than computation, in little time to plan; beside `checkmate`, which takes"
        " longer.",
        "delta": "As `dtr`, where what is dear to make again had better go to the host.",
        "coop": "As `dtr`; to see what evicting neighbours in memory makes of it.",
        "megtaichi": "As `dtr`; to see what counting free neighbours in memory makes of it.",
        "str": "As `capuchin`, where copies are many: what a swap hides under is worked out anew after each choice.",
        "mpress": "As a stage of a pipeline with devices that have room to spare (`--devices`); on one device, where"
        " swaps that hide and computation that is cheap are to share the work.",
        "distflashattn": "For long sequences with attention in one op, as much on the device as `chen` keeps and"
        " without attention computed twice.",
        "te": "Where the host has room, and layers are alike: the simplest offloading there is.",
        "loongtrain": "As `distflashattn`, where not even attention's results fit.",
        "ppaware": "As a stage of a pipeline (`--devices`); on one device, where what hides is offloaded and the"
        " cheapest runs again.",
        # Several devices alone.
        "dapple": "For a pipeline whose stages fit as they are (`--devices`): one forward, one backward in turn.",
        "dapple-recompute": "For a pipeline whose stages fit only without activations (`--devices`).",
    }
)
