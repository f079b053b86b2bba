"""MLLA's attention, MALA, RALA and NaLa on CUDA devices: see `state_kernels`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.declaring import empty_tokens
from subquad.kernels.triton.launch import SUMMED, lines_of, split_of, tile_of, total
from subquad.kernels.triton.state_kernels import (
    answers_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
    query_sum_kernel,
    state_kernel,
)
from subquad.kernels.triton.tiles import Tokens, tokens_of


class Form(NamedTuple):
    """What the kernels are told of a mechanism: features, halves of them, what is made of their products."""

    name: str
    KIND: str
    STREAMS: int
    FORM: str


MLLA = Form("mlla", "elu", 1, "divided")
MALA = Form("mala", "elu", 1, "subtracted")
RALA = Form("rala", "elu", 1, "weighed")
NALA = Form("nala", "nala", 2, "divided")

Tables = tuple[Tensor | None, Tensor | None, bool]
"""cos and sin (n, d) or (h, n, d), which may be absent, and whether pairs are neighbours."""


def tables_of(tables: Tables) -> tuple[Tokens | None, ...]:
    """Tables as tokens of all images, and of all heads where these turn alike."""
    found = [table if table is None else table.contiguous() for table in tables[:2]]
    return tuple(
        Tokens(table, 0, 0, table.stride(0)) if table is not None and table.dim() == 2 else tokens_of(table)
        for table in found
    )


def turn_of(tables: Tables) -> str:
    """Which channels are turned together: none, pairs of neighbours, or those of two halves."""
    return "none" if tables[0] is None else "pairs" if tables[2] else "halves"


def _settings(form: Form, tables: Tables) -> dict[str, Any]:
    return {"KIND": form.KIND, "STREAMS": form.STREAMS, "FORM": form.FORM, "TURN": turn_of(tables)}


def _tile(form: Form, kernel: str, x: Tensor, *, heavy: int = 0) -> dict[str, Any]:
    # what is subtracted leaves little of both numbers
    exact = form.FORM == "subtracted"
    # as tf32 tiles take twice the room that they do as bf16
    wide = form.STREAMS == 2 or exact or x.dtype == torch.float16
    heavy += int((bool(heavy) and wide) or (exact and x.dtype == torch.float16))
    return tile_of(f"{form.name}.{kernel}", x, heavy=heavy, exact=exact, ahead=1 if heavy else 2)


def _scales(form: Form, k: Tensor) -> tuple[float, float]:
    """What the sums of features and those of values are multiplied by where they are read."""
    mean = 1 / k.shape[2]
    if form.FORM == "weighed":
        return 1.0, 0.0
    return mean * (k.shape[3] ** -0.5 if form.FORM == "subtracted" else 1.0), mean


def _state(form: Form, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
    """(b·h, streams, d + 3, d) of all keys, in fp32; see `state_kernels`."""
    (b, h, n, d), tile = k.shape, _tile(form, "state", k)
    split = split_of(k, tile["BLOCK"])
    state = k.new_zeros(b * h, split.pieces, form.STREAMS, d + 3, d, dtype=torch.float32)
    mean_query = normalizer = None
    if form.FORM == "weighed":
        mean_query = _query_sum(form, q) * (d**-0.5 / q.shape[2])
        normalizer = state.new_empty(b * h, split.pieces)
    state_kernel[b * h * split.pieces,](
        *map(tokens_of, (k, v)),
        *tables_of(tables),
        *(mean_query, state, normalizer, h, n, *split),
        **_settings(form, tables),
        **tile,
    )
    if normalizer is None or mean_query is None:
        return total(state)
    state = (state * normalizer.softmax(dim=1)[:, :, None, None, None]).sum(dim=1)
    state[:, 0, d + 1] = mean_query
    state[:, 0, d + 2] = normalizer.logsumexp(dim=1)[:, None]
    return state


def _query_sum(form: Form, q: Tensor) -> Tensor:
    """Σ φ(q) (b·h, d) of all queries, in fp32."""
    (b, h, n, d), settings = q.shape, lines_of(f"{form.name}.query_sum", q, block=SUMMED)
    split = split_of(q, settings["BLOCK"])
    sums = q.new_empty(b * h, split.pieces, d, dtype=torch.float32)
    query_sum_kernel[b * h * split.pieces,](tokens_of(q), sums, h, n, *split, KIND=form.KIND, **settings)
    return total(sums).contiguous()


def _forward(form: Form, q: Tensor, k: Tensor, v: Tensor, tables: Tables, eps: float) -> tuple[Tensor, Tensor]:
    """The outputs, and the state of all keys."""
    (b, h, n, _), state, out = q.shape, _state(form, q, k, v, tables), empty_tokens(q)
    tile = _tile(form, "spread", q, heavy=int(form.STREAMS == 2))
    split = split_of(q, tile["BLOCK"])
    answers_kernel[b * h * split.pieces,](
        *map(tokens_of, (q, out)),
        *tables_of(tables),
        *(state, h, n, *split, *_scales(form, k), eps),
        **_settings(form, tables),
        **tile,
    )
    return out, state


def _backward(
    form: Form, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, tables: Tables, eps: float, state: Tensor
) -> tuple[Tensor, ...]:
    """To q, k and v, from the state of all keys."""
    (b, h, n, d), weighed, state = q.shape, form.FORM == "weighed", state.contiguous()
    dq, dk, dv = map(empty_tokens, (q, k, v))
    of_queries, of_keys = (_tile(form, name, x, heavy=1) for name, x in (("dq", q), ("dk", k)))
    queries, keys = split_of(q, of_queries["BLOCK"]), split_of(k, of_keys["BLOCK"])
    settings, scales, turning = _settings(form, tables), _scales(form, k), tables_of(tables)

    def to_queries(dq: Tensor | None, dmean: Tensor | None, dstate: Tensor | None) -> None:
        query_gradient_kernel[b * h * queries.pieces,](
            *map(tokens_of, (grad, q, dq)),
            *turning,
            *(state, dmean, dstate, h, n, *queries, *scales, eps),
            **settings,
            **of_queries,
        )

    shares = state.new_zeros(b * h, queries.pieces, *state.shape[1:])
    to_queries(None if weighed else dq, None, shares)
    dstate, lost, dmean = total(shares), None, None
    if weighed:
        lost = (dstate[:, :, : d + 1] * state[:, :, : d + 1]).sum(dim=(1, 2, 3))
        dmean = state.new_empty(b * h, keys.pieces, d)
    key_gradient_kernel[b * h * keys.pieces,](
        *map(tokens_of, (k, v, dk, dv)),
        *turning,
        *(state, dstate, lost, dmean, h, k.shape[2], *keys, *scales),
        **settings,
        **of_keys,
    )
    if dmean is not None:
        to_queries(dq, total(dmean).contiguous() * (d**-0.5 / n), None)
    return dq, dk, dv


def _calls(form: Form) -> tuple[Any, ...]:
    """The operator of a mechanism, that which keeps its state, and their gradients."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, eps: float
    ) -> Tensor:
        return _forward(form, q, k, v, (cos, sin, interleaved), eps)[0]

    def keeping(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, eps: float
    ) -> tuple[Tensor, Tensor]:
        return _forward(form, q, k, v, (cos, sin, interleaved), eps)

    def keeping_gradient(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        interleaved: bool,
        eps: float,
        state: Tensor,
    ) -> tuple[Tensor, ...]:
        return _backward(form, grad, q, k, v, (cos, sin, interleaved), eps, state)

    def gradient(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        interleaved: bool,
        eps: float,
    ) -> tuple[Tensor, ...]:
        tables = cos, sin, interleaved
        return _backward(form, grad, q, k, v, tables, eps, _state(form, q, k, v, tables))

    return attention, keeping, gradient, keeping_gradient


for _form in (MLLA, MALA, RALA, NALA):
    _names = "attention", "attention_keeping", "attention_gradient", "attention_keeping_gradient"
    globals().update({f"{_form.name}_{name}": call for name, call in zip(_names, _calls(_form), strict=True)})
