"""Pairs that end differently, and why they may."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "create graph": "DDP cannot copy a gradient that has a graph into its bucket, and raises; AutoSync can",
    "backward for some inputs only": (
        "DDP waits for the gradients of all parameters and raises in the next forward pass; AutoSync sends what it has"
    ),
    "as views, data replaced": (
        "with gradient_as_bucket_view=True, DDP no longer sums gradients whose data was replaced; AutoSync does"
    ),
    "unused layers that DDP is not told of": (
        "DDP raises unless find_unused_parameters=True says that some parameters get no gradient; AutoSync finds them"
    ),
    "static graph, accumulated": "DDP fails with an internal assertion of its own (static_graph with no_sync)",
    "loss.backward instead of manual_backward": (
        "as under Lightning's DDP, a plain loss.backward() in manual optimization stays on its rank, so replicas drift "
        "apart; AutoSync compares weights when training ends, and raises"
    ),
    "ignored parameter of the model itself": (
        "DDP looks for '.scale', where it is told to ignore 'scale', and synchronizes it; AutoSync ignores it"
    ),
    "adversaries, accumulated": (
        "gradients that a part accumulated before it was toggled off are averaged by DDP in passing, by AutoSync when "
        "that part is synchronized next; the weights are equal"
    ),
    "callback: parts thawed": (
        "DDP never synchronizes what was frozen when training began, so its replicas drift apart; AutoSync plans anew"
    ),
}
REASONS["adversaries, accumulated in place"] = REASONS["adversaries, accumulated"]
REASONS["manual optimization with toggles"] = REASONS["adversaries, accumulated"]
REASONS["callback: backbone thawed"] = REASONS["callback: parts thawed"]
"""By case, or by ``case | plan``."""


def reason_for(case: str, plan: str) -> str | None:
    """Why this pair may differ; None if it must not."""
    return REASONS.get(f"{case} | {plan}", REASONS.get(case))
