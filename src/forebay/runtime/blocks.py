"""Finds the blocks of a model: which parameters move together, and whose forward needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forebay.device.compiling import compiled_modules, refuse_compiled_root
from forebay.errors import ModelError
from forebay.layout import align, is_dense
from forebay.memory import ALIGNMENT
from forebay.model import Block, Model, Parameter
from forebay.optim.rules import Keeping
from forebay.runtime.tiles import Tiled

__all__ = ["BoundModel", "at_every_place", "find_blocks", "whole_blocks"]

CUTS = 32
"""Neighbouring small modules outside of repeated lists are merged up to one part in ``CUTS`` of the model."""


@final
@dataclass(frozen=True)
class BoundModel:
    """A ``Model`` and the live objects that its names stand for."""

    model: Model
    parameters: dict[str, nn.Parameter]
    modules: dict[str, nn.Module]

    @property
    def compiled(self) -> tuple[str, ...]:
        """Names of the modules that torch.compile was applied to."""
        return compiled_modules(self.modules[""])


def find_blocks(
    root: nn.Module,
    override: Sequence[str] | None = None,
    read_outside: Collection[str] = (),
    *,
    keeping: Keeping = Keeping(),  # noqa: B008 - frozen
) -> BoundModel:
    """The blocks of ``root``, whose parameters the optimizer keeps as ``keeping`` says.

    Every child of a repeated ``ModuleList`` or ``Sequential`` is a block (of one that is a list itself, every child of
    that), and so is every tile of a weight; so is every module named in ``override``, where given, instead of those.
    Modules outside of them are merged with their neighbours up to a balanced size. A tied parameter belongs to the
    block of its first owner, and every owner's forward asks for that block; for the blocks named in ``read_outside``
    the root's does too, and so it does for modules that several of the repeated ones have, or one of them and what lies
    around: they run while one of these is in use.

    Raises ``ModelError`` for a name in ``override`` that is no module, for parameters that cannot move, for two of one
    memory, for a root that was compiled in place, and for modules of TorchScript.
    """
    refuse_compiled_root(root)
    _refuse_scripted(root)
    _refuse_holding(root)
    parameters = dict(root.named_parameters())
    names = _names(root)
    for name, parameter in parameters.items():
        _refuse_immovable(name, parameter)
    _refuse_overlapping(parameters)
    modules = dict(root.named_modules())
    whole = whole_blocks(root, override)
    shared = _shared(root, set(whole.values()))
    starts = [name for name, module in whole.items() if module not in shared]
    lent = {p for p in parameters if modules[p.rpartition(".")[0]] in shared}
    groups = _group(starts, parameters, lent)
    owners, asked = _owners(root), _askers(root, groups, starts, parameters)
    blocks = []
    for start, members in groups:
        laid = [(p, parameters[p]) for p in members]
        specs, nbytes = _lay_out(laid, names, keeping)
        askers = asked[start]
        held = any(_encloses(owner, other, owners) for owner in askers for other, _ in groups if other != start)
        held = held and start not in starts
        if start in read_outside or members[0] in lent:
            held, askers = True, [*askers, ""]
        blocks.append(Block(start, specs, tuple(dict.fromkeys(askers)), nbytes, held))
    buffers = sum(b.nbytes for b in {id(b): b for b in root.buffers()}.values())
    return BoundModel(Model(tuple(blocks), buffers), parameters, modules)


def _askers(
    root: nn.Module,
    groups: Sequence[tuple[str, list[str]]],
    starts: Sequence[str],
    parameters: dict[str, nn.Parameter],
) -> dict[str, list[str]]:
    """For each of ``groups`` the modules whose forward needs its parameters."""
    home_of = {id(parameters[p]): start for start, members in groups for p in members}
    asked: dict[str, dict[str, None]] = {start: {} for start, _ in groups}
    for name, module in root.named_modules():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            home = home_of[id(parameter)]
            # The block's own module first; then the owner itself, which may be called without it: a checkpointed
            # forward is run again without the hooks of the module that it belongs to.
            inside = home in starts and _within(name, home)
            asked[home] |= dict.fromkeys((home, name) if inside else (name,))
    return {home: list(askers) for home, askers in asked.items()}


def _shared(root: nn.Module, wholes: set[nn.Module]) -> set[nn.Module]:
    """Modules that are in several of ``wholes``, or in one of them and outside of it."""
    around: dict[nn.Module, set[nn.Module]] = {}

    def walk(module: nn.Module, outermost: nn.Module) -> None:
        known = around.setdefault(module, set())
        if outermost in known:
            return
        known.add(outermost)
        for child in module.children():
            walk(child, child if outermost is root and child in wholes else outermost)

    walk(root, root)
    return {module for module, outer in around.items() if len(outer) > 1}


def whole_blocks(root: nn.Module, override: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The modules of ``root`` that are blocks by themselves, by name: those named in ``override``, where given, else
    every child of a repeated list. Raises ``ModelError`` for a name that is no module, or not in a list."""
    if override is None:
        return dict(_repeated(root, ""))
    if isinstance(override, str):
        raise ModelError(f"blocks are the names of modules in a list, got {override!r}; give [{override!r}]")
    if not isinstance(override, Collection) or not all(isinstance(name, str) for name in override):
        raise ModelError(f"blocks are the names of modules in a list, got {override!r}; see model.named_modules()")
    modules = dict(root.named_modules())
    missing = [name for name in override if name not in modules]
    if missing:
        raise ModelError(f"blocks: the model has no module called {missing[0]!r}; see model.named_modules()")
    return {name: modules[name] for name in override}


def at_every_place(model: nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``values``, by the names of parameters and buffers, under a name of each place where a module of ``model`` holds
    one: tied ones have several places, and a module that occurs several times is one place."""
    named = (*model.named_parameters(), *model.named_buffers())
    own = {id(tensor): values[name] for name, tensor in named if name in values}
    places = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) in own:
                places[f"{path}.{name}" if path else name] = own[id(tensor)]
    return places


def _refuse_scripted(root: nn.Module) -> None:
    """Raises ``ModelError`` for a module of TorchScript: it takes no hooks, and its ops are seen by nobody."""
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"module {name}" if name else "the model"
            raise ModelError(
                f"{what} is TorchScript's (torch.jit.script, torch.jit.trace), and nothing can be brought in front of "
                "its ops; give prepare() the model as it was before, and compile blocks with torch.compile if at all"
            )


def _refuse_holding(root: nn.Module) -> None:
    """Raises ``ModelError`` for layers that hang their weight on autograd's nodes themselves, where no hook sees it."""
    for name, module in root.named_modules():
        quantised = (type(p) for p in module._parameters.values() if p is not None and type(p) is not nn.Parameter)
        if not _is_of("bitsandbytes", type(module)) or not any(_is_of("bitsandbytes", kind) for kind in quantised):
            continue
        what = type(module).__name__
        remedy = "call forebay.integrations.bitsandbytes.stream(model) before prepare()"
        if not isinstance(module, nn.Linear):
            remedy = "load it as it is (llm_int8_skip_modules); linear layers are served"
        raise ModelError(
            f"{name} is a {what} of bitsandbytes, which keeps its weight from forward to backward; {remedy}"
        )


def _is_of(library: str, kind: type) -> bool:
    return kind.__module__.partition(".")[0] == library


def _refuse_immovable(name: str, parameter: nn.Parameter) -> None:
    value: object = parameter.data
    if is_traceable_wrapper_subclass(value):
        raise ModelError(
            f"parameter {name} is a {type(value).__name__}, which is several tensors in one; forebay moves "
            f"plain ones: quantise with bitsandbytes, or not at all"
        )
    if parameter.layout is not torch.strided or not is_dense(parameter.shape, parameter.stride()):
        raise ModelError(f"parameter {name} is sparse or overlaps itself; make it dense (parameter.contiguous())")
    if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"parameter {name} is trained in {parameter.dtype}; use float32, bfloat16 or float16")


def _refuse_overlapping(parameters: Mapping[str, nn.Parameter]) -> None:
    """Two that are tied by their memory and not by what they are: each would have a home, and so values, of its own."""
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in parameters.items():
        if parameter.is_meta:
            continue  # it has none yet, and may be one that transformers has still to tie
        start = int(parameter.storage_offset()) * parameter.itemsize
        place = start, start + parameter.nbytes, name
        by_storage.setdefault(parameter.untyped_storage()._cdata, []).append(place)
    for places in by_storage.values():
        before, end = "", 0
        for start, after, name in sorted(places):
            if start < min(after, end) and (parameters[name].requires_grad or parameters[before].requires_grad):
                raise ModelError(
                    f"parameters {before} and {name} are two and share memory; make them one (a.weight = b.weight, as "
                    f"tied layers have it), or give one of them memory of its own (clone())"
                )
            if after > end:
                before, end = name, after


def _names(root: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, the first one being its own."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Children, with parameters, of the outermost lists in which a class occurs twice or more; and those of lists of
    one that have no such list in them: a model of one layer, or of one that its forward runs again and again (ALBERT).
    """
    children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
    classes = [type(c) for _, c in children]
    repeated = isinstance(module, nn.ModuleList | nn.Sequential) and len(set(classes)) < len(classes)
    if isinstance(module, nn.ModuleList) and len(children) == 1:
        repeated = next(_repeated(children[0][1], ""), None) is None
    for name, child in children:
        full = f"{prefix}.{name}" if prefix else name
        yield from (_called if repeated else _repeated)(child, full)


def _called(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """``module``, or where nobody calls it, for it is a list itself, what is in it. One with a tiled layer in it would
    put all tiles into one block: it is looked into."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for inner, child in module.named_children():
            if any(True for _ in child.parameters()):
                yield from _called(child, f"{name}.{inner}")
    elif any(isinstance(inner, Tiled) for inner in module.modules()):
        yield from _repeated(module, name)
    else:
        yield name, module


def _group(
    starts: Sequence[str], parameters: dict[str, nn.Parameter], lent: Collection[str]
) -> list[tuple[str, list[str]]]:
    """Names of parameters by block, in the order of the model: first those of ``starts``, then what lies around. Those
    that are ``lent`` to several of these are no part of one, and are by themselves."""
    total = sum(p.nbytes for p in parameters.values())
    groups: list[tuple[str, list[str]]] = []
    loose = 0
    for name, parameter in parameters.items():
        start = None if name in lent else next((s for s in starts if _within(name, s)), None)
        if groups and (groups[-1][1][0] in lent) != (name in lent):
            loose = 0
        if start is not None:
            if groups and groups[-1][0] == start:
                groups[-1][1].append(name)
            else:
                known = next((g for g in groups if g[0] == start), None)
                if known is not None:
                    known[1].append(name)
                else:
                    groups.append((start, [name]))
            loose = 0
            continue
        owner = name.rpartition(".")[0]
        same_owner = bool(groups) and loose > 0 and groups[-1][1][-1].rpartition(".")[0] == owner
        if same_owner or (loose > 0 and loose + parameter.nbytes <= total // CUTS):
            groups[-1][1].append(name)
            loose += parameter.nbytes
        else:
            groups.append((owner or "(root)", [name]))
            loose = parameter.nbytes
    return _unique(groups)


def _unique(groups: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Makes block names unique: a module whose parameters fell into two blocks gives its name to the first."""
    seen: dict[str, int] = {}
    unique = []
    for name, members in groups:
        seen[name] = seen.get(name, 0) + 1
        unique.append((name if seen[name] == 1 else f"{name}#{seen[name]}", members))
    return unique


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _owners(root: nn.Module) -> set[str]:
    """Names of modules that own parameters directly."""
    return {n for n, m in root.named_modules() if any(p is not None for p in m._parameters.values())}


def _encloses(owner: str, other: str, owners: set[str]) -> bool:
    """Whether the forward of module ``owner`` runs modules of block ``other``."""
    if not owner:
        return True
    return other != owner and _within(other.partition("#")[0], owner)


def _lay_out(
    members: Sequence[tuple[str, nn.Parameter]], names: dict[int, list[str]], keeping: Keeping
) -> tuple[tuple[Parameter, ...], int]:
    specs, end = [], 0
    for name, parameter in members:
        aliases = tuple(n for n in names[id(parameter)] if n != name)
        specs.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                stride=tuple(parameter.stride()),
                dtype=str(parameter.dtype).removeprefix("torch."),
                nbytes=parameter.nbytes,
                offset=end,
                trainable=parameter.requires_grad and parameter.numel() > 0,
                aliases=aliases,
                master=keeping.masters or parameter.dtype is not torch.bfloat16,
                orthogonal=id(parameter) in keeping.orthogonal,
            )
        )
        end += align(parameter.nbytes)
    # A buffer of no bytes is nowhere: parameters without elements have one of the least length.
    return tuple(specs), max(end, ALIGNMENT)
