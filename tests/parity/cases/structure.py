"""What modules are made of: layouts, kinds of parameters and buffers, sharing, parts that are not always used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from models import CLASSES, FEATURES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parity.case import Family
from parity.parts import HIDDEN, Task, adamw, mlp, sgd

if TYPE_CHECKING:
    from parity.side import Side

family = Family("modules")


class Net(nn.Module):
    """[batch, FEATURES] to [batch, CLASSES] by two layers with something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.body(inputs))))

    def middle(self, hidden: Tensor) -> Tensor:
        return hidden


# Layers --------------------------------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """Treats [batch, HIDDEN] as a sequence of two."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.layer(hidden.view(-1, 2, HIDDEN // 2))
        return (found[0] if isinstance(found, tuple) else found).flatten(1)


class Image(nn.Module):
    """Treats [batch, HIDDEN] as images of 2 x 4 with one channel."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden.view(-1, 1, 2, 4)).mean(dim=1).flatten(1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(HIDDEN),
    "batch norm, cumulative": lambda: nn.BatchNorm1d(HIDDEN, momentum=None),
    "batch norm, no statistics": lambda: nn.BatchNorm1d(HIDDEN, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm(HIDDEN),
    "group norm": lambda: nn.GroupNorm(2, HIDDEN),
    "instance norm": lambda: Image(nn.Conv2d(1, 2, 1), nn.InstanceNorm2d(2, track_running_stats=True)),
    "dropout": lambda: nn.Dropout(0.3),
    "LSTM": lambda: Sequence(nn.LSTM(HIDDEN // 2, HIDDEN // 2, num_layers=2, batch_first=True)),
    "GRU, both ways": lambda: Sequence(nn.GRU(HIDDEN // 2, HIDDEN // 4, batch_first=True, bidirectional=True)),
    "transformer layer": lambda: Sequence(nn.TransformerEncoderLayer(HIDDEN // 2, 2, 8, batch_first=True)),
    "convolution": lambda: Image(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)),
    "convolution, channels last": lambda: Image(nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)).to(
        memory_format=torch.channels_last
    ),
    "grouped convolution": lambda: Image(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(HIDDEN, HIDDEN)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(HIDDEN, HIDDEN)),
    "PReLU": lambda: nn.PReLU(),
    "bilinear": lambda: _Twice(nn.Bilinear(HIDDEN, HIDDEN, HIDDEN)),
}


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden, hidden)


for _name, _layer in LAYERS.items():
    family.add(_name, lambda side, layer=_layer: side.fit(Task(mlp(layer()), adamw)))
for _name in ("batch norm", "convolution", "spectral norm", "dropout"):
    family.add(
        f"{_name}, accumulated",
        lambda side, layer=LAYERS[_name]: side.fit(Task(mlp(layer())), accumulate_grad_batches=3),
    )
family.add(
    "batch norm, buffers left alone",
    lambda side: side.fit(Task(mlp(nn.BatchNorm1d(HIDDEN)))),
    broadcast_buffers=False,
)
family.add(
    "synchronized batch norm",
    lambda side: side.fit(Task(mlp(nn.BatchNorm1d(HIDDEN))), sync_batchnorm=True),
    raises="SyncBatchNorm layers only work with GPU",
    plans=("default", "native"),
)
family.add(
    "convolution, channels last, fused",
    lambda side: side.fit(
        Task(mlp(LAYERS["convolution, channels last"]()), lambda p: torch.optim.Adam(p, lr=0.02, fused=True))
    ),
)
family.add(
    "convolution, channels last, as views",
    lambda side: side.fit(
        Task(mlp(LAYERS["convolution, channels last"]()), lambda p: torch.optim.Adam(p, lr=0.02, fused=True))
    ),
    gradient_as_bucket_view=True,
)

# Parameters ----------------------------------------------------------------------------------------------------------


class Shifted(Net):
    """Adds what ``make`` gives, reduced to one number or [HIDDEN], to the hidden units."""

    def __init__(self, make: Callable[[], Tensor], use: Callable[[Tensor], Tensor] = lambda own: own) -> None:
        super().__init__()
        self.own, self.use = nn.Parameter(make()), use

    def middle(self, hidden: Tensor) -> Tensor:
        return hidden + self.use(self.own)


PARAMETERS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "scalar": (lambda: torch.tensor(0.5), lambda own: own),
    "empty": (lambda: torch.zeros(0), lambda own: own.sum()),
    "empty matrix": (lambda: torch.zeros(3, 0), lambda own: own.sum()),
    "transposed": (lambda: torch.randn(HIDDEN, 3).t(), lambda own: own.sum(dim=0)),
    "transposed in three dimensions": (lambda: torch.randn(2, 3, HIDDEN).permute(1, 0, 2), lambda own: own.sum((0, 1))),
    "with gaps": (lambda: torch.randn(HIDDEN, 2)[:, 0], lambda own: own),
    "double": (lambda: torch.randn(HIDDEN, dtype=torch.float64), lambda own: own.float()),
    "bfloat16": (lambda: torch.randn(HIDDEN, dtype=torch.bfloat16), lambda own: own.float()),
    "half": (lambda: torch.randn(HIDDEN, dtype=torch.float16), lambda own: own.float()),
    "complex": (lambda: torch.randn(HIDDEN, dtype=torch.complex64), lambda own: own.abs()),
    "complex double": (lambda: torch.randn(2, HIDDEN, dtype=torch.complex128).mT, lambda own: own.abs().sum(1).float()),
    "of one element": (lambda: torch.ones(1, 1), lambda own: own.squeeze()),
}
for _name, (_make, _use) in PARAMETERS.items():
    family.add(f"parameter: {_name}", lambda side, make=_make, use=_use: side.fit(Task(Shifted(make, use))))
family.add(
    "parameter: expanded",
    lambda side: side.fit(Task(Shifted(lambda: torch.randn(1).expand(HIDDEN), lambda own: own)), max_epochs=1),
    raises="more than one element of the written-to tensor",
)
family.add(
    "parameter: transposed, fused, as views",
    lambda side: side.fit(
        Task(Shifted(*PARAMETERS["transposed"]), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True))
    ),
    gradient_as_bucket_view=True,
)
family.add(
    "parameter: complex, Adam", lambda side: side.fit(Task(Shifted(*PARAMETERS["complex"]), adamw), max_epochs=1)
)
family.add(
    "parameter: complex, accumulated",
    lambda side: side.fit(Task(Shifted(*PARAMETERS["complex"])), accumulate_grad_batches=2),
)


@family()
def whole_numbers_that_do_not_train(side: Side) -> None:
    net = Net()
    net.counts = nn.Parameter(torch.arange(4), requires_grad=False)
    net.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
    side.fit(Task(net, lambda _: sgd([*net.body.parameters(), *net.head.parameters()])))


@family()
def lists_and_dictionaries_of_parameters(side: Side) -> None:
    class Lists(Net):
        def __init__(self) -> None:
            super().__init__()
            self.few = nn.ParameterList([torch.randn(HIDDEN) for _ in range(3)])
            self.named = nn.ParameterDict({"one": torch.randn(HIDDEN), "two": nn.Parameter(torch.randn(1))})
            self.layers = nn.ModuleDict({"a": nn.Linear(HIDDEN, HIDDEN), "b": nn.ModuleList([nn.Tanh()])})

        def middle(self, hidden: Tensor) -> Tensor:
            for own in (*self.few, *self.named.values()):
                hidden = hidden * own
            return self.layers["a"](hidden)

    side.fit(Task(Lists()))


# Buffers -------------------------------------------------------------------------------------------------------------


@family()
def buffers_of_all_kinds(side: Side) -> None:
    class Buffers(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
            self.register_buffer("mean", torch.zeros(HIDDEN, dtype=torch.float64))
            self.register_buffer("lost", torch.zeros(HIDDEN), persistent=False)
            self.register_buffer("empty", torch.zeros(0))
            self.register_buffer("nothing", None)
            self.register_buffer("turned", torch.zeros(HIDDEN, 2).t())

        def middle(self, hidden: Tensor) -> Tensor:
            if self.training:
                self.steps += 1 + side.rank
                self.seen[self.steps % 3] = True
                self.mean.lerp_(hidden.detach().mean(dim=0).double(), 0.1)
                self.lost = self.lost + hidden.detach().mean(dim=0)  # another tensor each time
                self.turned.add_(0.1)
            return hidden + self.mean.float() + 0.1 * self.lost + 0.01 * self.steps + self.turned.sum(dim=0)

    side.fit(Task(Buffers()))


@family()
def buffers_that_training_reads_while_accumulating(side: Side) -> None:
    class Offset(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.zeros(HIDDEN))

        def middle(self, hidden: Tensor) -> Tensor:
            hidden = hidden + self.offset
            if self.training:
                self.offset += 0.01 * (side.rank + 1)
            return hidden

    side.fit(Task(Offset()), accumulate_grad_batches=2, val_check_interval=2)


@family()
def buffers_that_validation_changes(side: Side) -> None:
    class Offset(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.zeros(HIDDEN))

        def middle(self, hidden: Tensor) -> Tensor:
            if not self.training:
                self.offset += 0.01 * (side.rank + 1)
            return hidden + self.offset

    side.fit(Task(Offset()), val_check_interval=1)


@family()
def parameters_and_buffers_that_ddp_is_told_to_ignore(side: Side) -> None:
    class Ignores(Task):
        def __init__(self) -> None:
            super().__init__(mlp(nn.BatchNorm1d(HIDDEN)))
            self._ddp_params_and_buffers_to_ignore = ["net.0.bias", "net.2.running_mean"]

        def on_train_end(self) -> None:
            side.note("own", self.net[0].bias)

    torch.manual_seed(side.rank)
    side.fit(Ignores())


@family(plans=("default",))
def ignored_by_one_name_of_two(side: Side) -> None:
    """A tied weight, which DDP finds under its other name, and a module that occurs twice, which DDP looks at once."""

    class Ignores(Task):
        def __init__(self) -> None:
            super().__init__(mlp(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)))
            self.net[3].weight = self.net[2].weight
            self.again = self.net[4]
            self._ddp_params_and_buffers_to_ignore = ["net.2.weight", "net.4.bias"]

    side.fit(Ignores())


@family(plans=("default",))
def ignored_parameter_of_the_model_itself(side: Side) -> None:
    class Ignores(Task):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self._ddp_params_and_buffers_to_ignore = ["scale"]

        def forward(self, inputs: Tensor) -> Tensor:
            return self.scale * self.net(inputs)

    side.fit(Ignores())


# Sharing, freezing, leaving out --------------------------------------------------------------------------------------


@family()
def tied_weights(side: Side) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.second.weight = self.first.weight

        def middle(self, hidden: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(hidden)))

    side.fit(Task(Tied()))


@family()
def one_layer_under_two_names(side: Side) -> None:
    net = mlp(nn.Linear(HIDDEN, HIDDEN))
    net.append(nn.Identity())
    module = Task(net)
    module.alias = net[2]
    side.fit(module)


@family()
def a_layer_used_several_times(side: Side) -> None:
    layer = nn.Linear(HIDDEN, HIDDEN)
    side.fit(Task(mlp(layer, nn.Tanh(), layer, nn.Tanh(), layer)))


@family()
def frozen_part(side: Side) -> None:
    module = Task(mlp(nn.Linear(HIDDEN, HIDDEN)))
    module.net[2].requires_grad_(False)
    side.fit(module)


@family()
def frozen_part_with_running_statistics(side: Side) -> None:
    module = Task(mlp(nn.BatchNorm1d(HIDDEN)))
    module.net[0].requires_grad_(False)
    module.net[2].requires_grad_(False)
    side.fit(module)


class Choosing(Net):
    """Layers of which a step uses some."""

    def __init__(self, choose: Callable[[int], list[int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(3)])
        self.choose, self.count = choose, 0

    def middle(self, hidden: Tensor) -> Tensor:
        for place in self.choose(self.count):
            hidden = torch.tanh(self.layers[place](hidden))
        self.count += self.training
        return hidden


UNUSED: dict[str, Callable[[int, int], list[int]]] = {
    "one layer never": lambda rank, step: [0, 1],
    "by rank": lambda rank, step: [rank],
    "by step": lambda rank, step: [step % 3],
    "by rank and step": lambda rank, step: [(rank + step) % 3, step % 2],
    "none at times": lambda rank, step: [0] if step % 2 else [],
    "by rank 0 only": lambda rank, step: [] if rank else [0, 1, 2],
}
for _name, _choose in UNUSED.items():
    for _settings in ({}, {"accumulate_grad_batches": 2}):
        family.add(
            f"unused layers: {_name}{', accumulated' if _settings else ''}",
            lambda side, choose=_choose, settings=_settings: side.fit(
                Task(Choosing(lambda step: choose(side.rank, step))), **settings
            ),
            unused=True,
        )
family.add(
    "unused layers: one never, momentum and decay",
    lambda side: side.fit(Task(Choosing(lambda step: [step % 2]), adamw)),
    unused=True,
)
family.add(
    "unused layers: zeroed in place",
    lambda side: side.fit(_ZeroedInPlace(Choosing(lambda step: [(step + side.rank) % 3]), adamw)),
    unused=True,
)
family.add(
    "unused layers that DDP is not told of",
    lambda side: side.fit(Task(Choosing(lambda step: [0, 1])), max_epochs=1),
)
family.add(
    "unused layers, as views",
    lambda side: side.fit(Task(Choosing(lambda step: [(step + side.rank) % 3]))),
    unused=True,
    gradient_as_bucket_view=True,
)


class _ZeroedInPlace(Task):
    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@family(unused=True)
def mixture_of_experts(side: Side) -> None:
    class Experts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(HIDDEN, 4)
            self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])

        def middle(self, hidden: Tensor) -> Tensor:
            weights, chosen = self.gate(hidden).softmax(dim=1).max(dim=1)
            found = torch.zeros_like(hidden)
            for place, expert in enumerate(self.experts):
                rows = (chosen == place).nonzero().view(-1)
                if len(rows):
                    found = found.index_add(0, rows, expert(hidden[rows]) * weights[rows, None])
            return found

    side.fit(Task(Experts()))


@family(unused=True)
def outputs_that_the_loss_leaves_out(side: Side) -> None:
    class Outputs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(HIDDEN, 2)

        def middle(self, hidden: Tensor) -> Tensor:
            self.left_out = {"extra": [self.extra(hidden)]}
            return hidden

    side.fit(Task(Outputs()))


@family()
def layers_dropped_at_random(side: Side) -> None:
    class Random(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(HIDDEN, HIDDEN)

        def middle(self, hidden: Tensor) -> Tensor:
            return hidden + self.layer(hidden) * (torch.rand(()) > 0.5)

    side.fit(Task(Random()))


# Activation checkpoints ----------------------------------------------------------------------------------------------


class Checkpointed(Net):
    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.2))
        self.reentrant, self.times = reentrant, times

    def middle(self, hidden: Tensor) -> Tensor:
        for _ in range(self.times):
            hidden = torch.tanh(checkpoint(self.layer, hidden, use_reentrant=self.reentrant))
        return hidden


for _reentrant in (False, True):
    _name = "reentrant " if _reentrant else ""
    for _times in (1, 2):
        for _static in (False, True):
            if _reentrant and _times == 2 and not _static:
                continue
            family.add(
                f"{_name}checkpoints, {_times} use{'s' if _times > 1 else ''}{', static graph' if _static else ''}",
                lambda side, reentrant=_reentrant, times=_times: side.fit(Task(Checkpointed(reentrant, times))),
                **({"static_graph": True} if _static else {}),
            )
family.add(
    "reentrant checkpoints, 2 uses, graph not static",
    lambda side: side.fit(Task(Checkpointed(True, 2)), max_epochs=1),
    raises="mark a variable ready only once",
)
family.add(
    "reentrant checkpoints, accumulated",
    lambda side: side.fit(Task(Checkpointed(True)), accumulate_grad_batches=2),
)
family.add("static graph", lambda side: side.fit(Task()), static_graph=True)
family.add("static graph, accumulated", lambda side: side.fit(Task(), accumulate_grad_batches=2), static_graph=True)
family.add(
    "static graph with an unused layer",
    lambda side: side.fit(Task(Choosing(lambda step: [0, 1]))),
    static_graph=True,
)

# Kinds of modules ----------------------------------------------------------------------------------------------------


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(values)
        return torch.sign(values) * weight

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, (gradient * torch.sign(context.saved_tensors[0])).sum(dim=0)


@family()
def autograd_function_of_the_users(side: Side) -> None:
    class Signs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN))

        def middle(self, hidden: Tensor) -> Tensor:
            return _Straight.apply(hidden, self.weight)

    side.fit(Task(Signs()))


@family()
def a_lightning_module_within_another(side: Side) -> None:
    class Outer(Task):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Task(mlp())

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs) + self.inner(inputs)

    side.fit(Outer())


@family()
def module_made_in_configure_model(side: Side) -> None:
    class Late(Task):
        def __init__(self) -> None:
            super().__init__(nn.Identity())
            self.late: nn.Module | None = None

        def configure_model(self) -> None:
            if self.late is None:
                torch.manual_seed(5 + self.global_rank)
                self.late = mlp(nn.BatchNorm1d(HIDDEN))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.late(inputs)

    side.fit(Late())


@family()
def module_made_in_setup(side: Side) -> None:
    class Late(Task):
        def setup(self, stage: str) -> None:
            self.net = mlp(nn.Linear(HIDDEN, HIDDEN))

    side.fit(Late())


@family(raises="ninitialized")
def lazy_modules(side: Side) -> None:
    side.fit(Task(nn.Sequential(nn.LazyLinear(HIDDEN), nn.Tanh(), nn.LazyLinear(CLASSES))), max_epochs=1)


@family(plans=("default", "native"))
def scripted_part(side: Side) -> None:
    side.fit(Task(torch.jit.script(mlp())), max_epochs=1)


@family(plans=("default", "native", "ring"))
def compiled_part(side: Side) -> None:
    module = Task()
    module.net = torch.compile(module.net, backend="aot_eager")
    side.fit(module, max_epochs=1)


@family()
def everything_frozen_but_one_bias(side: Side) -> None:
    module = Task()
    module.requires_grad_(False)
    module.net[2].bias.requires_grad_(True)
    side.fit(module)


@family(plans=("default", "native"), raises="that requires a gradient")
def everything_frozen(side: Side) -> None:
    class Still(Task):
        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step(batch, index).requires_grad_()

    still = Still()
    still.requires_grad_(False)
    side.fit(still, max_epochs=1)


# Precision -----------------------------------------------------------------------------------------------------------

for _precision in ("bf16-mixed", "bf16-true", "64-true", "16-true"):
    for _net in ("plain", "batch norm"):
        if (_precision, _net) == ("16-true", "batch norm"):
            continue
        family.add(
            f"{_precision}, {_net}",
            lambda side, precision=_precision, normed=_net == "batch norm": side.fit(
                Task(mlp(nn.BatchNorm1d(HIDDEN)) if normed else mlp()), precision=precision
            ),
        )
family.add(
    "bf16-true, accumulated",
    lambda side: side.fit(Task(), precision="bf16-true", accumulate_grad_batches=2, gradient_clip_val=0.1),
)


@family()
def scaled_gradients(side: Side) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    class Overflows(Task):
        def loss(self, batch: Any) -> Tensor:
            overflow = self.training and self.trainer.fit_loop.epoch_loop.batch_idx == 2 and side.rank == 1
            return super().loss(batch) * (float("inf") if overflow else 1.0)

    side.fit(Overflows(), plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], gradient_clip_val=0.1)


@family()
def double_module_by_hand(side: Side) -> None:
    class Double(Task):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self(batch[0].double()), batch[1])

    side.fit(Double(mlp().double()))
