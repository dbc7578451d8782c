"""Linear layers and embeddings whose weight is never on the device as a whole. It is cut into *tiles*, modules with a
parameter each, so that every tile is a block like any other.

A linear layer needs its weight twice, and each sum has to run over what it runs over in plain PyTorch:

forward    an output is a sum over the input features: some rows of the weight, all columns
backward   the gradient of an input is a sum over the output features: all rows of the weight, some columns
           the gradient of the weight is a sum over the tokens, which any tile of it has for itself

So the weight is cut both ways. A *panel* is what one product needs: the tiles of one row of the grid in forward, of one
column in backward, copied next to each other as they come. Every tile crosses the link once forward and once backward,
as the weight does when it is whole. The result has the bits of plain PyTorch wherever a matrix product gives to some
columns the bits that they have in the whole product; that is up to the library, and ``is_exact`` tries it out.

ZeRO-Infinity's memory-centric tiling (Rajbhandari et al. 2021, section 5.1.3) makes a sequence of smaller layers. The
gradient of the input is then a sum over these, which rounds otherwise.

Gradients of tiles must not be made all at once. A node of autograd's graph returns all its gradients together, so each
tile has a node of its own (``_Share``, ``_Found``): it stands for the tile's part of the output, with the shape of that
part and no bytes, and the product is said to have read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast, final

import torch
from torch import nn
from torch.nn import functional as F

from forebay.errors import ModelError
from forebay.loss import pieces
from forebay.runtime.grids import GRAIN, Grid, Span, longest

__all__ = ["Tile", "Tiled", "TiledEmbedding", "TiledLinear", "is_exact"]

aten = torch.ops.aten


@final
class Tile(nn.Module):
    """Some rows and columns of a weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, use: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What ``use`` makes of the weight, which is on the device until it returns."""
        return use(self.weight)


class Tiled(nn.Module, ABC):
    """A layer whose ``weight`` is in ``tiles``, one for each of ``grid``. Its state dict has the weight as a whole."""

    def __init__(self, grid: Grid, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.grid = grid
        self.tiles = nn.ModuleList([Tile(weight) for weight in weights])
        self.register_state_dict_post_hook(_join)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_split)  # type: ignore[no-untyped-call]

    @abstractmethod
    def untiled(self) -> nn.Module:
        """The layer that this one stands for, of the same sizes, without values (on the meta device)."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the weight."""
        return self.parts()[0].dtype

    def parts(self) -> list[torch.Tensor]:
        """The weights of all tiles."""
        return [cast(Tile, tile).weight for tile in self.tiles]


def _join(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """After the hooks of the tiles: what is there are values, wherever the tiles live."""
    names = [f"{prefix}tiles.{number}.weight" for number in range(len(module.tiles))]
    if all(name in state for name in names):
        state[f"{prefix}weight"] = module.grid.joined(state.pop(name) for name in names)


def _split(module: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *errors: Any) -> None:
    """Before the tiles look for their own. A weight of another shape stays, and torch says that nobody wants it."""
    whole = state.get(f"{prefix}weight")
    if isinstance(whole, torch.Tensor) and tuple(whole.shape) == module.grid.shape:
        del state[f"{prefix}weight"]
        for number in range(len(module.tiles)):
            state[f"{prefix}tiles.{number}.weight"] = module.grid.cut(whole, number)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise ModelError("a tiled layer has no second derivative (create_graph=True); leave forebay.tile out")


def stand_for(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of that shape in one element of memory. Nobody reads it."""
    return torch.empty_strided((rows, columns), (0, 0), dtype=like.dtype, device=like.device)


@final
class TiledLinear(Tiled):
    """``torch.nn.Linear``: (..., ``in_features``) to (..., ``out_features``)."""

    def __init__(self, grid: Grid, weights: Sequence[nn.Parameter], bias: nn.Parameter | None) -> None:
        super().__init__(grid, weights)
        self.out_features, self.in_features = grid.shape
        self.bias = bias

    def untiled(self) -> nn.Module:
        sizes = self.in_features, self.out_features, self.bias is not None
        return nn.Linear(*sizes, device="meta", dtype=self.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # By torch's own function: between blocks that is where a graph is cut (``runtime/cuts.py``).
        rows = hidden.reshape(-1, self.in_features)
        bias: torch.Tensor | None = self.bias
        dtype, kind = self.dtype, hidden.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            rows, bias = rows.to(dtype), None if bias is None else bias.to(dtype)
        shares = []
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in self.parts()):
            spans = self.grid.tiles
            shares = [_share(w, rows, *span) for w, span in zip(self.parts(), spans, strict=True)]
        # torch's linear layer adds the bias within the product or after it (``aten/src/ATen/native/Linear.cpp``).
        within = hidden.dim() == 2 or (hidden.dim() > 2 and hidden.is_contiguous())
        product: torch.Tensor = _product(self, dtype, rows, bias if within else None, *shares)
        made = product.view(*hidden.shape[:-1], self.out_features)
        return made if bias is None or within else made + bias

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """What the layer makes of ``rows``, computed in ``dtype``. Of no rows it is made without any tile."""
        made = rows.new_empty((len(rows), self.out_features))
        for row, (first, end) in enumerate(self.grid.rows if len(rows) else ()):
            panel, part = self.row_panel(row, dtype, rows.device), made[:, first:end]
            if bias is None:
                torch.mm(rows, panel.t(), out=part)
            else:
                torch.addmm(bias[first:end], rows, panel.t(), out=part)
            del panel  # before the next one is made
        return made

    def times_weight(self, gradient: torch.Tensor, into: torch.Tensor) -> None:
        """Writes the product of ``gradient``, that of what the layer makes, and the weight into ``into``."""
        for column, (first, end) in enumerate(self.grid.columns if len(gradient) else ()):
            numbers = range(column, len(self.grid.tiles), len(self.grid.columns))
            panel = self._panel(numbers, gradient.dtype, gradient.device)
            torch.mm(gradient, panel, out=into[:, first:end])
            del panel

    def row_panel(self, row: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tiles of a row of the grid next to each other, as ``dtype``."""
        across = len(self.grid.columns)
        return self._panel(range(row * across, (row + 1) * across), dtype, device)

    def _panel(self, numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tiles with these ``numbers``, a row or a column of the grid. They come one by one."""
        tiles = [self.grid.tiles[number] for number in numbers]
        ((top, _), (left, _)), ((_, bottom), (_, right)) = tiles[0], tiles[-1]
        panel = torch.empty((bottom - top, right - left), dtype=dtype, device=device)
        for number, ((first, end), (start, stop)) in zip(numbers, tiles, strict=True):
            self.tiles[number](panel[first - top : end - top, start - left : stop - left].copy_)
        return panel


@final
class _Product(torch.autograd.Function):
    """The product and the gradient of what goes in. The gradient of each of ``shares`` is that of its part."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: TiledLinear,
        dtype: torch.dtype,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        *shares: torch.Tensor,
    ) -> torch.Tensor:
        ctx.layer, ctx.shares = layer, len(shares)
        # Not for its values: to unpack it is what tells the session that backward has begun.
        ctx.save_for_backward(rows)
        return layer.product(rows, bias, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _refuse_second_derivative()
        layer, (rows,), gradient = ctx.layer, ctx.saved_tensors, gradients[0]
        of_rows = of_bias = None
        if ctx.needs_input_grad[2]:
            of_rows = torch.empty_like(rows)
            layer.times_weight(gradient, of_rows)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.sum(0)
        shares = [gradient[:, first:end] for (first, end), _ in layer.grid.tiles] if ctx.shares else []
        return None, None, of_rows, of_bias, *shares


@final
class _Share(torch.autograd.Function):
    """Stands for what one tile contributes to a product; makes the tile's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: torch.Tensor, down: Span, along: Span) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.along, ctx.dtype = along, weight.dtype
        return stand_for(len(rows), down[1] - down[0], rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _refuse_second_derivative()
        (rows,) = ctx.saved_tensors
        first, end = ctx.along
        made = torch.mm(gradients[0].t(), rows[:, first:end]) if ctx.needs_input_grad[0] else None
        return None if made is None else made.to(ctx.dtype), None, None, None


_product: Any = _Product.apply
_share: Any = _Share.apply


@final
class TiledEmbedding(Tiled):
    """``torch.nn.Embedding``: integers of any shape to (..., ``embedding_dim``). The same numbers however it is cut."""

    def __init__(self, grid: Grid, weights: Sequence[nn.Parameter], padding_idx: int | None) -> None:
        super().__init__(grid, weights)
        self.num_embeddings, self.embedding_dim = grid.shape
        self.padding_idx = padding_idx

    def untiled(self) -> nn.Module:
        sizes = self.num_embeddings, self.embedding_dim, self.padding_idx
        return nn.Embedding(*sizes, device="meta", dtype=self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        flat = index.reshape(-1)
        found = []
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in self.parts()):
            tiles = zip(self.parts(), self.grid.tiles, strict=True)
            found = [_found(w, flat, row, along, self.padding_idx) for w, (row, along) in tiles]
        made: torch.Tensor = _lookup(self, flat, *found)
        return made.view(*index.shape, self.embedding_dim)


@final
class _Lookup(torch.autograd.Function):
    """The rows looked up. The gradient of each of ``found`` is that of its columns."""

    @staticmethod
    def forward(ctx: Any, layer: TiledEmbedding, flat: torch.Tensor, *found: torch.Tensor) -> torch.Tensor:
        grid, rows = layer.grid, layer.grid.rows
        made = torch.empty((len(flat), layer.embedding_dim), dtype=layer.dtype, device=flat.device)
        for row, (first, end) in enumerate(rows):
            # What is in no tile is looked up in the first or the last one, and refused there as in a whole weight.
            inside = (flat >= first) | (row == 0)
            inside &= (flat < end) | (row == len(rows) - 1)
            place = torch.where(inside, flat - first, 0)
            for column, (start, stop) in enumerate(grid.columns):
                look = partial(_look_up, made[:, start:stop], place, inside)
                layer.tiles[row * len(grid.columns) + column](look)
        ctx.grid, ctx.found = grid, len(found)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _refuse_second_derivative()
        found = [gradients[0][:, first:end] for _, (first, end) in ctx.grid.tiles]
        return None, None, *(found if ctx.found else [])


def _look_up(into: torch.Tensor, place: torch.Tensor, inside: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Writes the rows of ``weight`` at ``place`` into ``into``, but for those that are not ``inside``."""
    return into.copy_(torch.where(inside[:, None], F.embedding(place, weight), into))


@final
class _Found(torch.autograd.Function):
    """Stands for what is looked up in one tile; makes the tile's gradient."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, flat: torch.Tensor, row: Span, along: Span, padding: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(flat)
        ctx.row, ctx.padding = row, padding
        return stand_for(len(flat), along[1] - along[0], weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _refuse_second_derivative()
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        (flat,), (first, end) = ctx.saved_tensors, ctx.row
        count = end - first
        inside = (flat >= first) & (flat < end)
        if ctx.padding is not None:
            inside &= flat != ctx.padding
        # A place behind the last one stands for what is elsewhere, and is said to be padding: torch's kernel leaves
        # that out, and adds up the rest in the order of the tokens, as it does for a whole weight.
        place = torch.where(inside, flat - first, count)
        made = aten.embedding_dense_backward.default(gradients[0], place, count, count, False)
        return made, None, None, None, None


_lookup: Any = _Lookup.apply
_found: Any = _Found.apply

MOST_TRIED = 1 << 22
"""Elements of the weight with which ``is_exact`` tries."""


def is_exact(grid: Grid, tokens: int, dtype: torch.dtype, device: torch.device, *, bias: bool) -> bool:
    """Whether a product cut like ``grid`` gives the bits of the whole on this ``device``, as far as one try can tell.

    It is tried with ``tokens`` tokens, all columns and as many rows as make ``MOST_TRIED`` elements: no proof for more.
    """
    count = max(2 * GRAIN, MOST_TRIED // grid.shape[1])
    rows = grid.rows if count >= grid.shape[0] else pieces(count, longest(grid.rows), GRAIN)
    if len(rows) < 2:
        rows = pieces(rows[-1][1], rows[-1][1] // 2, GRAIN)
    tried = Grid((rows[-1][1], grid.shape[1]), rows, grid.columns)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int, spread: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(spread).to(device=device, dtype=dtype)

    hidden = numbers(max(1, tokens), grid.shape[1]).requires_grad_()
    weight = numbers(*tried.shape, spread=grid.shape[1] ** -0.5).requires_grad_()
    offset = numbers(tried.shape[0]).requires_grad_() if bias else None
    upstream = numbers(len(hidden), tried.shape[0])
    with torch.enable_grad():
        parts = [nn.Parameter(tried.cut(weight.detach(), n).clone()) for n in range(len(tried.tiles))]
        layer = TiledLinear(tried, parts, None if offset is None else nn.Parameter(offset.detach().clone()))
        leaves = [hidden, weight, *([] if offset is None else [offset])]
        cut = [hidden, *parts, *([] if layer.bias is None else [layer.bias])]
        whole, made = F.linear(hidden, weight, offset), layer(hidden)
        expected = torch.autograd.grad(whole, leaves, upstream)
        first, *others = torch.autograd.grad(made, cut, upstream)
    found = [first, tried.joined(others[: len(parts)]), *others[len(parts) :]]
    return torch.equal(whole, made) and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
