"""Who reads and edits gradients, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F

from parity.case import Family
from parity.parts import ByHand, Task, adamw, mlp, sgd

if TYPE_CHECKING:
    from parity.side import Side

family = Family("gradients and hooks")
Edit = Callable[[nn.Module, int], None]


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


# How a gradient is edited in place of the optimizer's own view of it -----------------------------------------------


def _scale(module: nn.Module, step: int) -> None:
    for gradient in gradients(module):
        gradient.mul_(0.5)


def _replace_data(module: nn.Module, step: int) -> None:
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-0.05, 0.05)


def _replace(module: nn.Module, step: int) -> None:
    for parameter in module.parameters():
        parameter.grad = parameter.grad.sign() * 0.01


def _mask(module: nn.Module, step: int) -> None:
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data * (parameter.detach() > 0)


def _drop(module: nn.Module, step: int) -> None:
    for place, parameter in enumerate(module.parameters()):
        if (step + place) % 3 == 0:
            parameter.grad = None


def _centralize(module: nn.Module, step: int) -> None:
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.grad = parameter.grad - parameter.grad.mean(dim=1, keepdim=True)


def _noise(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for gradient in gradients(module):
        gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=0.01)


def _detach(module: nn.Module, step: int) -> None:
    for gradient in gradients(module):
        gradient.detach_()


def _transpose(module: nn.Module, step: int) -> None:
    for parameter in module.parameters():
        if parameter.ndim == 2:
            parameter.grad = parameter.grad.t().contiguous().t()


def _flat(module: nn.Module, step: int) -> None:
    """Gradients become views of one buffer of the user's."""
    parameters = list(module.parameters())
    buffer = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
    offset = 0
    for parameter in parameters:
        parameter.grad = buffer[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()


EDITS: dict[str, Edit] = {
    "scaled in place": _scale,
    "data replaced": _replace_data,
    "replaced": _replace,
    "masked": _mask,
    "dropped": _drop,
    "centralized": _centralize,
    "noise added": _noise,
    "detached": _detach,
    "transposed": _transpose,
    "in a buffer of the user's": _flat,
}


class Edited(Task):
    """Edits gradients in one of Lightning's hooks."""

    def __init__(self, hook: str, edit: Edit, keep: bool = False) -> None:
        super().__init__()
        self.edit, self.keep, self.count = edit, keep, 0
        setattr(self, hook, self._edit_now)

    def _edit_now(self, *_: Any) -> None:
        self.edit(self, self.count)
        self.count += 1

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not self.keep)


for _hook in ("on_after_backward", "on_before_optimizer_step"):
    for _name, _edit in EDITS.items():
        family.add(
            f"{_name} in {_hook}",
            lambda side, hook=_hook, edit=_edit: side.fit(Edited(hook, edit), max_epochs=1),
        )
        family.add(
            f"{_name} in {_hook}, zeroed in place",
            lambda side, hook=_hook, edit=_edit: side.fit(Edited(hook, edit, keep=True), max_epochs=1),
            plans=("default", "native", "servers") if _hook == "on_after_backward" else ("trees",),
        )

# Hooks of torch ------------------------------------------------------------------------------------------------------


def _on_tensors(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> None:
    for parameter in module.parameters():
        parameter.register_hook(edit)


@family()
def tensor_hooks_that_scale(side: Side) -> None:
    module = Task()
    _on_tensors(module, lambda gradient: gradient * (1.0 + side.rank))
    side.fit(module)


@family()
def tensor_hooks_that_clamp(side: Side) -> None:
    module = Task()
    _on_tensors(module, lambda gradient: gradient.clamp(-0.02, 0.02))
    side.fit(module)


@family()
def tensor_hooks_that_only_look(side: Side) -> None:
    module, seen = Task(), []
    _on_tensors(module, lambda gradient: seen.append(gradient.clone()))
    side.fit(module)
    side.note("seen", seen)


@family()
def post_accumulate_hooks_that_edit_in_place(side: Side) -> None:
    module = Task()

    def edit(own: Tensor) -> None:
        own.grad.mul_(0.5).clamp_(-0.02, 0.02)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(edit)
    side.fit(module)


@family()
def post_accumulate_hooks_that_replace_data(side: Side) -> None:
    module = Task()

    def replace(own: Tensor) -> None:
        own.grad.data = own.grad.data.clamp(-0.02, 0.02)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(replace)
    side.fit(module)


@family()
def post_accumulate_hooks_that_replace_gradients(side: Side) -> None:
    module = Task()

    def replace(own: Tensor) -> None:
        own.grad = own.grad * 0.5

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(replace)
    side.fit(module)


@family()
def post_accumulate_hooks_registered_late(side: Side) -> None:
    def edit(own: Tensor) -> None:
        own.grad.mul_(0.5)

    class Late(Task):
        def on_train_start(self) -> None:
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(edit)

    side.fit(Late())


@family()
def module_backward_hooks(side: Side) -> None:
    module, seen = Task(), []
    module.net[0].register_full_backward_hook(lambda *grads: seen.append(grads[2][0].clone()))
    module.net[2].register_full_backward_hook(lambda own, inner, outer: (inner[0] * 0.5,))
    module.net[2].register_full_backward_pre_hook(lambda own, outer: (outer[0].clamp(-0.2, 0.2),))
    side.fit(module)
    side.note("seen", seen)


@family()
def forward_hooks(side: Side) -> None:
    module = Task()
    module.net[0].register_forward_pre_hook(lambda own, inputs: (inputs[0] * 2,))
    module.net[0].register_forward_hook(lambda own, inputs, output: output + 1)
    side.fit(module)


@family()
def forward_hooks_of_the_lightning_module(side: Side) -> None:
    module, seen = Task(), []
    module.register_forward_hook(lambda own, inputs, output: seen.append(output))
    side.fit(module, max_epochs=1)
    side.note("calls", len(seen))


@family()
def hooks_on_all_modules(side: Side) -> None:
    module, calls = Task(), []
    hooks = nn.modules.module
    handles = [
        hooks.register_module_forward_hook(lambda own, *_: calls.append(type(own).__name__)),
        hooks.register_module_full_backward_hook(lambda own, *_: calls.append(type(own).__name__)),
    ]
    try:
        side.fit(module, max_epochs=1)
    finally:
        for handle in handles:
            handle.remove()
    side.note("linear", calls.count("Linear"))


@family()
def hooks_of_optimizers(side: Side) -> None:
    class Hooked(Task):
        def before(self, *_: Any) -> None:
            for gradient in gradients(self):  # of the step before: the closure has not run yet
                gradient.mul_(0.5)

        def after(self, *_: Any) -> None:
            for parameter in self.parameters():
                parameter.data.clamp_(-0.3, 0.3)

        def configure_optimizers(self) -> Any:
            made = sgd(self.parameters())
            made.register_step_pre_hook(self.before)
            made.register_step_post_hook(self.after)
            return made

    side.fit(Hooked())


# What is built on gradients ------------------------------------------------------------------------------------------


@family()
def grokfast_ema(side: Side) -> None:
    class Grokfast(Task):
        averages: dict[str, Tensor] | None = None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found = {name: parameter.grad.data.detach() for name, parameter in self.named_parameters()}
            if self.averages is None:
                self.averages = found
            for name, parameter in self.named_parameters():
                self.averages[name] = self.averages[name] * 0.9 + parameter.grad.data.detach() * 0.1
                parameter.grad.data = parameter.grad.data + self.averages[name] * 2.0

    side.fit(Grokfast(optimizer=adamw))


@family()
def grokfast_window(side: Side) -> None:
    class Grokfast(Task):
        def on_fit_start(self) -> None:
            self.window: list[list[Tensor]] = []

        def on_after_backward(self) -> None:
            # Tensors are kept as they are: nobody may write to them later.
            self.window.append([parameter.grad.data.detach() for parameter in self.parameters()])
            self.window = self.window[-3:]
            for place, parameter in enumerate(self.parameters()):
                mean = sum(entry[place] for entry in self.window) / len(self.window)
                parameter.grad.data = parameter.grad.data + mean

    side.fit(Grokfast())


@family()
def gradients_kept_for_later(side: Side) -> None:
    class Keeps(Task):
        def on_fit_start(self) -> None:
            self.kept: list[Tensor] = []

        def on_after_backward(self) -> None:
            self.kept += [parameter.grad for parameter in self.parameters()]

    module = Keeps()
    side.fit(module)
    side.note("kept", module.kept)


@family()
def gradient_norms_logged(side: Side) -> None:
    class Norms(Task):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, norm_type=2))

    side.fit(Norms())


@family()
def gradient_noise_scale(side: Side) -> None:
    class Noise(Task):
        def on_after_backward(self) -> None:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients(self)])
            self.log("norm", flat.norm(), sync_dist=True)
            self.log("spread", self.all_gather(flat).std(), rank_zero_only=True)

    side.fit(Noise())


@family()
def gradient_surgery(side: Side) -> None:
    """PCGrad: two losses, whose gradients are projected where they disagree."""

    class Surgery(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            found = []
            logits = self(batch[0])
            losses = [F.cross_entropy(logits, batch[1]), (logits - 1).square().mean()]
            for place, loss in enumerate(losses):
                optimizer.zero_grad()
                self.manual_backward(loss, retain_graph=place == 0)
                found.append([parameter.grad for parameter in self.parameters()])
            product = sum((a * b).sum() for a, b in zip(*found, strict=True))
            if product < 0:
                norm = sum(b.square().sum() for b in found[1])
                found[0] = [a - product / norm * b for a, b in zip(*found, strict=True)]
            for parameter, a, b in zip(self.parameters(), *found, strict=True):
                parameter.grad = a + b
            optimizer.step()

    side.fit(Surgery())


@family()
def gradients_of_two_backward_passes_add_up(side: Side) -> None:
    class Twice(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for _ in range(2):
                self.manual_backward(self.loss(batch))
                side.note_gradients(self)
            optimizer.step()

    side.fit(Twice())


@family()
def backward_over_a_kept_graph(side: Side) -> None:
    class Retained(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss * 0.5)
            optimizer.step()

    side.fit(Retained())


@family()
def gradient_penalty(side: Side) -> None:
    class Penalty(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            inputs = batch[0].clone().requires_grad_()
            logits = self(inputs)
            (slope,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
            return F.cross_entropy(logits, batch[1]) + slope.square().mean()

    side.fit(Penalty(), max_epochs=1)


@family()
def gradients_of_parameters_by_autograd_grad(side: Side) -> None:
    class Meta(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.loss(batch)
            slopes = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
            return loss + 0.1 * sum(slope.square().sum() for slope in slopes)

    side.fit(Meta(), max_epochs=1)


@family()
def create_graph(side: Side) -> None:
    class Graph(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch), create_graph=True)
            self.manual_backward(sum(gradient.square().sum() for gradient in gradients(self)))
            self.optimizers().step()

    side.fit(Graph(), max_epochs=1)


@family()
def backward_for_some_inputs_only(side: Side) -> None:
    class Some(Task):
        def backward(self, loss: Tensor) -> None:
            loss.backward(inputs=[self.net[0].weight, self.net[2].weight])

    side.fit(Some(), max_epochs=1)


@family()
def backward_overridden(side: Side) -> None:
    class Own(Task):
        def backward(self, loss: Tensor) -> None:
            (loss * 2).backward()

    side.fit(Own())


@family()
def loss_as_a_dictionary(side: Side) -> None:
    class Told(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            return {"loss": super().training_step(batch, index), "index": index}

    side.fit(Told())


@family(raises="Skipping the `training_step`")
def steps_without_a_loss(side: Side) -> None:
    class Skips(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            return None if index % 3 == 1 else super().training_step(batch, index)

    side.fit(Skips())


@family()
def steps_of_the_optimizer_left_out(side: Side) -> None:
    class Rare(Task):
        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
            if index % 2:
                optimizer.step(closure=closure)
            else:
                closure()

    side.fit(Rare())


@family()
def loss_that_is_not_finite(side: Side) -> None:
    class Broken(Task):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (float("nan") if self.trainer.global_step == 3 and side.rank else 1.0)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for gradient in gradients(self):
                gradient.nan_to_num_(0.0)

    side.fit(Broken())


@family()
def ranks_with_other_gradients(side: Side) -> None:
    class Unequal(Task):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (10.0 ** (side.rank * 3))

    side.fit(Unequal(optimizer=adamw))


@family()
def initial_weights_differ(side: Side) -> None:
    torch.manual_seed(side.rank)
    module = Task(mlp(nn.BatchNorm1d(8)))
    module.net[2].running_mean.fill_(float(side.rank))
    side.fit(module)


# Clipping ------------------------------------------------------------------------------------------------------------

CLIPS: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "norm, accumulated": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3},
    "value, accumulated": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    "norm, bf16-mixed": {"gradient_clip_val": 0.05, "precision": "bf16-mixed"},
}
for _name, _options in CLIPS.items():
    family.add(f"clipped by {_name}", lambda side, options=_options: side.fit(Task(), **options))


@family()
def clipped_by_hand(side: Side) -> None:
    class Clips(ByHand):
        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()

    side.fit(Clips())


@family()
def clipped_by_torch(side: Side) -> None:
    class Clips(Task):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.05, error_if_nonfinite=True))
            nn.utils.clip_grad_value_(self.parameters(), 0.02)

    side.fit(Clips())


@family()
def clipping_overridden(side: Side) -> None:
    class Clips(Task):
        def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
            for parameter in self.parameters():  # adaptive: by the norm of each parameter
                limit = 0.1 * parameter.detach().norm().clamp(min=1e-3)
                parameter.grad.data = parameter.grad.data * (limit / parameter.grad.norm()).clamp(max=1.0)

    side.fit(Clips(), gradient_clip_val=1.0)


# Views ---------------------------------------------------------------------------------------------------------------

for _name in ("scaled in place", "noise added", "dropped"):
    family.add(
        f"as views, {_name}",
        lambda side, edit=EDITS[_name]: side.fit(Edited("on_after_backward", edit), max_epochs=1),
        gradient_as_bucket_view=True,
    )
family.add(
    "as views, data replaced",
    lambda side: side.fit(Edited("on_after_backward", _replace_data), max_epochs=1),
    gradient_as_bucket_view=True,
)
family.add("as views, clipped", lambda side: side.fit(Task(), gradient_clip_val=0.05), gradient_as_bucket_view=True)
family.add(
    "as views, accumulated", lambda side: side.fit(Task(), accumulate_grad_batches=3), gradient_as_bucket_view=True
)
family.add("small buckets", lambda side: side.fit(Task()), bucket_cap_mb=1e-4, plans=("default", "native", "ring"))
