"""Image classifiers of torchvision."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autosync.workload.flow import Flow


def vgg16(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> Flow:
    """VGG-16 (Simonyan and Zisserman, ICLR 2015, configuration D): three quarters of it is one matrix."""
    image = Flow(batch_size, 3, resolution, resolution)
    index = 0
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            image.conv(f"features.{index}", width, 3, bias=True)
            index += 2  # a ReLU follows
        image.pool(2, 2)
        index += 1
    image.gather(7, 7).flatten()
    for index, width in ((0, 4096), (3, 4096), (6, classes)):
        image.linear(f"classifier.{index}", width)
    return image


def resnet50(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> Flow:
    """ResNet-50 (He et al., CVPR 2016), strides in the 3×3 convolutions."""
    return _resnet((3, 4, 6, 3), batch_size, resolution, classes)


def resnet101(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> Flow:
    """ResNet-101 (He et al., CVPR 2016), strides in the 3×3 convolutions."""
    return _resnet((3, 4, 23, 3), batch_size, resolution, classes)


def _resnet(depths: Sequence[int], batch_size: int, resolution: int, classes: int) -> Flow:
    image = Flow(batch_size, 3, resolution, resolution)
    image.conv("conv1", 64, 7, stride=2).norm("bn1").pool(3, 2, 1)
    for stage, depth in enumerate(depths, start=1):
        for block in range(depth):
            stride = 2 if stage > 1 and block == 0 else 1
            _bottleneck(image, f"layer{stage}.{block}", 32 * 2**stage, stride, project=block == 0)
    return image.gather().linear("fc", classes)


def _bottleneck(image: Flow, name: str, width: int, stride: int, project: bool) -> None:
    shortcut = image.fork()
    image.conv(f"{name}.conv1", width, 1).norm(f"{name}.bn1")
    image.conv(f"{name}.conv2", width, 3, stride=stride).norm(f"{name}.bn2")
    image.conv(f"{name}.conv3", 4 * width, 1).norm(f"{name}.bn3")
    if project:
        shortcut.conv(f"{name}.downsample.0", 4 * width, 1, stride=stride).norm(f"{name}.downsample.1")


def densenet121(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> Flow:
    """DenseNet-121 (Huang et al., CVPR 2017): very many small variables."""
    return _densenet((6, 12, 24, 16), batch_size, resolution, classes)


def densenet169(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> Flow:
    """DenseNet-169 (Huang et al., CVPR 2017)."""
    return _densenet((6, 12, 32, 32), batch_size, resolution, classes)


def densenet201(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> Flow:
    """DenseNet-201 (Huang et al., CVPR 2017)."""
    return _densenet((6, 12, 48, 32), batch_size, resolution, classes)


def _densenet(depths: Sequence[int], batch_size: int, resolution: int, classes: int, growth: int = 32) -> Flow:
    image = Flow(batch_size, 3, resolution, resolution)
    image.conv("features.conv0", 2 * growth, 7, stride=2).norm("features.norm0").pool(3, 2, 1)
    for block, depth in enumerate(depths, start=1):
        for layer in range(1, depth + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            grown = image.fork().norm(f"{name}.norm1").conv(f"{name}.conv1", 4 * growth, 1)
            grown.norm(f"{name}.norm2").conv(f"{name}.conv2", growth, 3)
            image.join((image.fork(), grown))
        if block < len(depths):
            name = f"features.transition{block}"
            image.norm(f"{name}.norm").conv(f"{name}.conv", image.channels // 2, 1).pool(2, 2)
    return image.norm("features.norm5").gather().linear("classifier", classes)
