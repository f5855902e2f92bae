"""Inception v3 of torchvision (Szegedy et al., CVPR 2016)."""

from __future__ import annotations

from lightning_autosync.workload.flow import Extent, Flow

ROW, COLUMN = (1, 7), (7, 1)


def inception_v3(*, batch_size: int = 32, resolution: int = 299, classes: int = 1000, aux_logits: bool = False) -> Flow:
    """Inception v3; ``aux_logits`` adds the second classifier that torchvision trains by default."""
    image = Flow(batch_size, 3, resolution, resolution)
    _conv(image, "Conv2d_1a_3x3", 32, 3, stride=2, padding=0)
    _conv(image, "Conv2d_2a_3x3", 32, 3, padding=0)
    _conv(image, "Conv2d_2b_3x3", 64, 3).pool(3, 2)
    _conv(image, "Conv2d_3b_1x1", 80, 1)
    _conv(image, "Conv2d_4a_3x3", 192, 3, padding=0).pool(3, 2)
    for name, pooled in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):
        _block_a(image, name, pooled)
    _block_b(image, "Mixed_6a")
    for name, width in (("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)):
        _block_c(image, name, width)
    if aux_logits:
        _auxiliary(image.fork(), "AuxLogits", classes)
    _block_d(image, "Mixed_7a")
    for name in ("Mixed_7b", "Mixed_7c"):
        _block_e(image, name)
    return image.gather().linear("fc", classes)


def _conv(
    image: Flow, name: str, channels: int, kernel: Extent, stride: int = 1, padding: Extent | None = None
) -> Flow:
    return image.conv(f"{name}.conv", channels, kernel, stride=stride, padding=padding).norm(f"{name}.bn")


def _chain(image: Flow, name: str, *convolutions: tuple[str, int, Extent]) -> Flow:
    """A branch of convolutions, each given by (suffix of its name, channels, kernel)."""
    branch = image.fork()
    for suffix, channels, kernel in convolutions:
        _conv(branch, f"{name}.{suffix}", channels, kernel)
    return branch


def _block_a(image: Flow, name: str, pooled: int) -> None:
    image.join(
        (
            _chain(image, name, ("branch1x1", 64, 1)),
            _chain(image, name, ("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)),
            _chain(image, name, ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)),
            _chain(image, name, ("branch_pool", pooled, 1)),
        )
    )


def _block_b(image: Flow, name: str) -> None:
    wide = _conv(image.fork(), f"{name}.branch3x3", 384, 3, stride=2, padding=0)
    deep = _chain(image, name, ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3))
    _conv(deep, f"{name}.branch3x3dbl_3", 96, 3, stride=2, padding=0)
    image.join((wide, deep, image.fork().pool(3, 2)))


def _block_c(image: Flow, name: str, width: int) -> None:
    image.join(
        (
            _chain(image, name, ("branch1x1", 192, 1)),
            _chain(
                image,
                name,
                ("branch7x7_1", width, 1),
                ("branch7x7_2", width, ROW),
                ("branch7x7_3", 192, COLUMN),
            ),
            _chain(
                image,
                name,
                ("branch7x7dbl_1", width, 1),
                ("branch7x7dbl_2", width, COLUMN),
                ("branch7x7dbl_3", width, ROW),
                ("branch7x7dbl_4", width, COLUMN),
                ("branch7x7dbl_5", 192, ROW),
            ),
            _chain(image, name, ("branch_pool", 192, 1)),
        )
    )


def _block_d(image: Flow, name: str) -> None:
    short = _chain(image, name, ("branch3x3_1", 192, 1))
    _conv(short, f"{name}.branch3x3_2", 320, 3, stride=2, padding=0)
    long = _chain(image, name, ("branch7x7x3_1", 192, 1), ("branch7x7x3_2", 192, ROW), ("branch7x7x3_3", 192, COLUMN))
    _conv(long, f"{name}.branch7x7x3_4", 192, 3, stride=2, padding=0)
    image.join((short, long, image.fork().pool(3, 2)))


def _block_e(image: Flow, name: str) -> None:
    narrow = _chain(image, name, ("branch1x1", 320, 1))
    flat = _chain(image, name, ("branch3x3_1", 384, 1))
    flat_halves = _halves(flat, f"{name}.branch3x3_2")
    deep = _chain(image, name, ("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3))
    deep_halves = _halves(deep, f"{name}.branch3x3dbl_3")
    image.join((narrow, *flat_halves, *deep_halves, _chain(image, name, ("branch_pool", 192, 1))))


def _halves(branch: Flow, name: str) -> tuple[Flow, Flow]:
    return _conv(branch.fork(), f"{name}a", 384, (1, 3)), _conv(branch.fork(), f"{name}b", 384, (3, 1))


def _auxiliary(image: Flow, name: str, classes: int) -> None:
    image.pool(5, 3)
    _conv(image, f"{name}.conv0", 128, 1)
    _conv(image, f"{name}.conv1", 768, 5, padding=0).gather().linear(f"{name}.fc", classes)
