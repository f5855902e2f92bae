"""Where parameters lie in a message's buffer."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_autosync.engine.gradients import is_dense, real_view, same_layout, variable_views


@st.composite
def parameters(draw: st.DrawFn) -> nn.Parameter:
    """Some shape, with its elements in memory in some order of its axes, real or complex."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from([torch.float32, torch.complex64]))
    values = torch.randn([shape[axis] for axis in order], dtype=dtype)
    back = [order.index(axis) for axis in range(len(order))]
    return nn.Parameter(values.permute(back))


@given(st.lists(parameters(), min_size=1, max_size=5), st.booleans())
def test_views_cover_the_buffer_once_and_keep_strides_where_asked(found: list[nn.Parameter], keep: bool) -> None:
    numel = sum(real_view(parameter).numel() for parameter in found)
    buffer = torch.zeros(numel + 3)
    views = variable_views(found, buffer, 0, keep)
    for number, (parameter, view) in enumerate(zip(found, views, strict=True)):
        assert view.shape == real_view(parameter).shape
        view.fill_(number + 1.0)
        if keep:
            assert same_layout(view, real_view(parameter))
    assert (buffer[:numel] > 0).all()
    assert (buffer[numel:] == 0).all()
    sizes = torch.bincount(buffer[:numel].long(), minlength=len(found) + 1)[1:].tolist()
    assert sizes == [real_view(parameter).numel() for parameter in found]


def test_gaps_and_overlaps_are_not_dense() -> None:
    assert is_dense(torch.ones(3, 4).t())
    assert is_dense(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert is_dense(torch.tensor(1.0))
    assert not is_dense(torch.ones(3, 4)[:, ::2])
    assert not is_dense(torch.ones(3, 1).expand(3, 4))
    assert not is_dense(torch.ones(0, 4))
