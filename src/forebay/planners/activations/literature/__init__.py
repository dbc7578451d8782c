"""Published planners for activations, one file each: what ``auto`` is compared with.

selective      the core of attention runs again
attention      distflashattn, loongtrain: attention's results stay, or move, and the rest runs again
vdnn           feature maps move: all, those that products read, or whichever is fastest
superneurons   what products make stays or moves, what is cheap runs again
flashneuron    tensors go to the disk in the order in which they are made
te             the first layers' activations move
capuchin       swap what lies idle, then swap or make again by seconds a byte
str_           the same choice made anew after each one
tsplit         the same for parts of tensors, where memory is short
rotor          which blocks run again, by dynamic programming
pofo           which blocks run again and which move, by dynamic programming
rockmate       a menu for every block, and the best of it by dynamic programming
joins          the same where several chains of blocks meet
checkmate      which ops run again, by integer programming
moccasin       the same by constraint programming
autotm         which tensors move, by integer programming
swapadvisor    which tensors move, by a genetic search
dtr            played to the recorded step: what is stale, large and cheap to make again is evicted
delta          the same by size and age, and swapped or made again, whichever is cheaper
coop           the same of neighbours in memory, by a sliding window
megtaichi      the same with free neighbours counted, and memory moved together
mpress         what lies idle is swapped, the rest runs again: one stage of a pipeline
ppaware        what hides is offloaded, the cheapest runs again: one stage of a pipeline

layers, graph  what they see of a model: its blocks, their ops, who reads what
placing        where parameters are, and from a decision to a plan or a refusal
moments        when ops run if nothing waits, and how long tensors lie idle
playing        a step played to a policy that decides while it runs; pool: memory as addresses
mixing         from a ranking of tensors to what a plan says
chaining       the dynamic programme over a chain of blocks; chained: with what blocks may be
branching      branch and bound

Each decides as its paper does where a plan can say so; its docstring says where ours departs, and why. What none of
them decides is the same for all: parameters, gradients and states stay on the device as far as there is room
(``placing``), and updates run after their step. A plan says of every block whether it runs again and what
becomes of each of its ops; that a segment of several blocks runs again, it cannot say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forebay.planners.activations.literature.attention import distflashattn, loongtrain
from forebay.planners.activations.literature.autotm import autotm
from forebay.planners.activations.literature.capuchin import capuchin
from forebay.planners.activations.literature.checkmate import checkmate
from forebay.planners.activations.literature.coop import coop
from forebay.planners.activations.literature.delta import delta
from forebay.planners.activations.literature.dtr import dtr
from forebay.planners.activations.literature.flashneuron import flashneuron
from forebay.planners.activations.literature.joins import joins
from forebay.planners.activations.literature.megtaichi import megtaichi
from forebay.planners.activations.literature.moccasin import moccasin
from forebay.planners.activations.literature.mpress import mpress
from forebay.planners.activations.literature.pofo import pofo
from forebay.planners.activations.literature.ppaware import ppaware
from forebay.planners.activations.literature.rockmate import rockmate
from forebay.planners.activations.literature.rotor import rotor
from forebay.planners.activations.literature.selective import selective
from forebay.planners.activations.literature.str_ import str_
from forebay.planners.activations.literature.superneurons import superneurons
from forebay.planners.activations.literature.swapadvisor import swapadvisor
from forebay.planners.activations.literature.te import te
from forebay.planners.activations.literature.tsplit import tsplit
from forebay.planners.activations.literature.vdnn import vdnn_all, vdnn_conv, vdnn_dyn
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["LITERATURE"]

LITERATURE: Mapping[str, Callable[[Problem, Bench | None], Plan]] = MappingProxyType(
    {
        "vdnn-all": vdnn_all,
        "vdnn-conv": vdnn_conv,
        "vdnn-dyn": vdnn_dyn,
        "superneurons": superneurons,
        "rotor": rotor,
        "capuchin": capuchin,
        "checkmate": checkmate,
        "autotm": autotm,
        "swapadvisor": swapadvisor,
        "joins": joins,
        "flashneuron": flashneuron,
        "dtr": dtr,
        "pofo": pofo,
        "tsplit": tsplit,
        "delta": delta,
        "megtaichi": megtaichi,
        "selective": selective,
        "rockmate": rockmate,
        "moccasin": moccasin,
        "str": str_,
        "mpress": mpress,
        "coop": coop,
        "distflashattn": distflashattn,
        "te": te,
        "loongtrain": loongtrain,
        "ppaware": ppaware,
    }
)
"""By the name that ``policy`` takes, in the order of publication."""
