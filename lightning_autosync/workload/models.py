"""Well-known models as sequences of layers, with the names and shapes of their public implementations.

Each function follows one batch through the model and returns the `LayerTrace`. Its keyword arguments, which all have
defaults, are the arguments that the catalogue offers.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload.layers import Extent, LayerTrace, distinct


def vgg16(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> LayerTrace:
    """VGG-16 (Simonyan and Zisserman, ICLR 2015, configuration D): one matrix has three quarters of all parameters."""
    image = LayerTrace(batch_size, 3, resolution, resolution)
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


def resnet50(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> LayerTrace:
    """ResNet-50 (He et al., CVPR 2016), strides in the 3×3 convolutions."""
    return _resnet((3, 4, 6, 3), batch_size, resolution, classes)


def resnet101(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> LayerTrace:
    """ResNet-101 (He et al., CVPR 2016), strides in the 3×3 convolutions."""
    return _resnet((3, 4, 23, 3), batch_size, resolution, classes)


def _resnet(depths: Sequence[int], batch_size: int, resolution: int, classes: int) -> LayerTrace:
    image = LayerTrace(batch_size, 3, resolution, resolution)
    image.conv("conv1", 64, 7, stride=2).norm("bn1").pool(3, 2, 1)
    for stage, depth in enumerate(depths, start=1):
        for block in range(depth):
            stride = 2 if stage > 1 and block == 0 else 1
            _bottleneck(image, f"layer{stage}.{block}", 32 * 2**stage, stride, project=block == 0)
    return image.gather().linear("fc", classes)


def _bottleneck(image: LayerTrace, name: str, width: int, stride: int, project: bool) -> None:
    shortcut = image.fork()
    image.conv(f"{name}.conv1", width, 1).norm(f"{name}.bn1")
    image.conv(f"{name}.conv2", width, 3, stride=stride).norm(f"{name}.bn2")
    image.conv(f"{name}.conv3", 4 * width, 1).norm(f"{name}.bn3")
    if project:
        shortcut.conv(f"{name}.downsample.0", 4 * width, 1, stride=stride).norm(f"{name}.downsample.1")


def densenet121(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> LayerTrace:
    """DenseNet-121 (Huang et al., CVPR 2017): very many small variables."""
    return _densenet((6, 12, 24, 16), batch_size, resolution, classes)


def densenet169(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> LayerTrace:
    """DenseNet-169 (Huang et al., CVPR 2017)."""
    return _densenet((6, 12, 32, 32), batch_size, resolution, classes)


def densenet201(*, batch_size: int = 32, resolution: int = 224, classes: int = 1000) -> LayerTrace:
    """DenseNet-201 (Huang et al., CVPR 2017)."""
    return _densenet((6, 12, 48, 32), batch_size, resolution, classes)


def _densenet(depths: Sequence[int], batch_size: int, resolution: int, classes: int, growth: int = 32) -> LayerTrace:
    image = LayerTrace(batch_size, 3, resolution, resolution)
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


ROW, COLUMN = (1, 7), (7, 1)


def inception_v3(
    *, batch_size: int = 32, resolution: int = 299, classes: int = 1000, aux_logits: bool = False
) -> LayerTrace:
    """Inception v3; ``aux_logits`` adds the second classifier that torchvision trains by default."""
    image = LayerTrace(batch_size, 3, resolution, resolution)
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
    image: LayerTrace, name: str, channels: int, kernel: Extent, stride: int = 1, padding: Extent | None = None
) -> LayerTrace:
    return image.conv(f"{name}.conv", channels, kernel, stride=stride, padding=padding).norm(f"{name}.bn")


def _chain(image: LayerTrace, name: str, *convolutions: tuple[str, int, Extent]) -> LayerTrace:
    """A branch of convolutions, each given as (suffix of its name, channels, kernel)."""
    branch = image.fork()
    for suffix, channels, kernel in convolutions:
        _conv(branch, f"{name}.{suffix}", channels, kernel)
    return branch


def _block_a(image: LayerTrace, name: str, pooled: int) -> None:
    image.join(
        (
            _chain(image, name, ("branch1x1", 64, 1)),
            _chain(image, name, ("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)),
            _chain(image, name, ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)),
            _chain(image, name, ("branch_pool", pooled, 1)),
        )
    )


def _block_b(image: LayerTrace, name: str) -> None:
    wide = _conv(image.fork(), f"{name}.branch3x3", 384, 3, stride=2, padding=0)
    deep = _chain(image, name, ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3))
    _conv(deep, f"{name}.branch3x3dbl_3", 96, 3, stride=2, padding=0)
    image.join((wide, deep, image.fork().pool(3, 2)))


def _block_c(image: LayerTrace, name: str, width: int) -> None:
    once = [("branch7x7_1", width, 1), ("branch7x7_2", width, ROW), ("branch7x7_3", 192, COLUMN)]
    kernels = (1, COLUMN, ROW, COLUMN, ROW)
    twice = [(f"branch7x7dbl_{n}", 192 if n == 5 else width, kernel) for n, kernel in enumerate(kernels, 1)]
    branches = ([("branch1x1", 192, 1)], once, twice, [("branch_pool", 192, 1)])
    image.join([_chain(image, name, *branch) for branch in branches])


def _block_d(image: LayerTrace, name: str) -> None:
    short = _chain(image, name, ("branch3x3_1", 192, 1))
    _conv(short, f"{name}.branch3x3_2", 320, 3, stride=2, padding=0)
    long = _chain(image, name, ("branch7x7x3_1", 192, 1), ("branch7x7x3_2", 192, ROW), ("branch7x7x3_3", 192, COLUMN))
    _conv(long, f"{name}.branch7x7x3_4", 192, 3, stride=2, padding=0)
    image.join((short, long, image.fork().pool(3, 2)))


def _block_e(image: LayerTrace, name: str) -> None:
    narrow = _chain(image, name, ("branch1x1", 320, 1))
    flat = _chain(image, name, ("branch3x3_1", 384, 1))
    flat_halves = _halves(flat, f"{name}.branch3x3_2")
    deep = _chain(image, name, ("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3))
    deep_halves = _halves(deep, f"{name}.branch3x3dbl_3")
    image.join((narrow, *flat_halves, *deep_halves, _chain(image, name, ("branch_pool", 192, 1))))


def _halves(branch: LayerTrace, name: str) -> tuple[LayerTrace, LayerTrace]:
    return _conv(branch.fork(), f"{name}a", 384, (1, 3)), _conv(branch.fork(), f"{name}b", 384, (3, 1))


def _auxiliary(image: LayerTrace, name: str, classes: int) -> None:
    image.pool(5, 3)
    _conv(image, f"{name}.conv0", 128, 1)
    _conv(image, f"{name}.conv1", 768, 5, padding=0).gather().linear(f"{name}.fc", classes)


BERT_POSITIONS = 512


def bert_base(*, batch_size: int = 32, layers: int = 12, tokens: int = 128, vocab: int = 30_522) -> LayerTrace:
    """BERT-base (Devlin et al., NAACL 2019), encoder and pooler; smaller ``layers`` give the shortened variants."""
    return _bert(768, batch_size, layers, tokens, vocab)


def bert_large(*, batch_size: int = 32, layers: int = 24, tokens: int = 128, vocab: int = 30_522) -> LayerTrace:
    """BERT-large (Devlin et al., NAACL 2019), encoder and pooler."""
    return _bert(1024, batch_size, layers, tokens, vocab)


def _bert(width: int, batch_size: int, layers: int, tokens: int, vocab: int) -> LayerTrace:
    if tokens > BERT_POSITIONS:
        raise WorkloadError(f"bert: tokens must be at most {BERT_POSITIONS}, got {tokens}")
    text = LayerTrace(batch_size, width, tokens)
    text.embedding("embeddings.word_embeddings", vocab, distinct(text.positions, vocab))
    text.embedding("embeddings.position_embeddings", BERT_POSITIONS, tokens)
    text.embedding("embeddings.token_type_embeddings", 2, 2).norm("embeddings.LayerNorm")
    for index in range(layers):
        name = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            text.fork().linear(f"{name}.attention.self.{part}", width)
        text.attention().linear(f"{name}.attention.output.dense", width)
        text.norm(f"{name}.attention.output.LayerNorm")
        text.linear(f"{name}.intermediate.dense", 4 * width).linear(f"{name}.output.dense", width)
        text.norm(f"{name}.output.LayerNorm")
    return text.gather().linear("pooler.dense", width)


def gpt(
    *, batch_size: int = 8, layers: int = 12, width: int = 768, vocab: int = 50_257, context: int = 1024
) -> LayerTrace:
    """GPT-2 (Radford et al., 2019; the defaults are its small size) on full contexts, with a tied head.

    The head's product gives the token table a dense gradient. The gradient is complete only at the very end of
    backward, which reaches the look-up last.
    """
    text = LayerTrace(batch_size, width, context)
    text.embedding("transformer.wte", vocab, rows_touched=vocab)
    text.embedding("transformer.wpe", context, rows_touched=context)
    for index in range(layers):
        name = f"transformer.h.{index}"
        text.norm(f"{name}.ln_1").fork().linear(f"{name}.attn.c_attn", 3 * width, transposed=True)
        text.attention().linear(f"{name}.attn.c_proj", width, transposed=True).norm(f"{name}.ln_2")
        text.linear(f"{name}.mlp.c_fc", 4 * width, transposed=True)
        text.linear(f"{name}.mlp.c_proj", width, transposed=True)
    return text.norm("transformer.ln_f").product(text.positions * width * vocab)


def ncf(
    *,
    batch_size: int = 1024,
    users: int = 138_493,
    items: int = 26_744,
    factors: int = 64,
    hidden: tuple[int, ...] = (256, 256, 128, 64),
) -> LayerTrace:
    """Neural collaborative filtering (NeuMF of He et al., WWW 2017), with names as in MLPerf's reference.

    Users and items default to those of MovieLens-20M. Both have two embeddings: one of width ``factors`` for the
    factorization, and one of width ``hidden[0] // 2`` for the perceptron.
    """
    pairs = LayerTrace(batch_size, factors)
    for prefix, width in (("mf", factors), ("mlp", hidden[0] // 2)):
        pairs.channels = width
        pairs.embedding(f"{prefix}_user_embed", users, distinct(batch_size, users))
        pairs.embedding(f"{prefix}_item_embed", items, distinct(batch_size, items))
    pairs.channels = 2 * (hidden[0] // 2)
    for index, width in enumerate(hidden[1:]):
        pairs.linear(f"mlp.{index}", width)
    pairs.channels += factors
    return pairs.linear("final", 1)
