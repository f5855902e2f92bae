"""Language models of Hugging Face transformers."""

from __future__ import annotations

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload.flow import Flow, distinct

BERT_POSITIONS = 512


def bert_base(*, batch_size: int = 32, layers: int = 12, tokens: int = 128, vocab: int = 30_522) -> Flow:
    """BERT-base (Devlin et al., NAACL 2019), encoder and pooler; ``layers`` gives the shortened ones too."""
    return _bert(768, batch_size, layers, tokens, vocab)


def bert_large(*, batch_size: int = 32, layers: int = 24, tokens: int = 128, vocab: int = 30_522) -> Flow:
    """BERT-large (Devlin et al., NAACL 2019), encoder and pooler."""
    return _bert(1024, batch_size, layers, tokens, vocab)


def _bert(width: int, batch_size: int, layers: int, tokens: int, vocab: int) -> Flow:
    if tokens > BERT_POSITIONS:
        raise WorkloadError(f"bert: tokens must be at most {BERT_POSITIONS}, got {tokens}")
    text = Flow(batch_size, width, tokens)
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


def gpt(*, batch_size: int = 8, layers: int = 12, width: int = 768, vocab: int = 50_257, context: int = 1024) -> Flow:
    """GPT-2 (Radford et al., 2019; the defaults are its small size) on full contexts, its head tied.

    The head's product gives the token table a dense gradient, which the look-up, backward's last
    act, completes.
    """
    text = Flow(batch_size, width, context)
    text.embedding("transformer.wte", vocab, rows_touched=vocab)
    text.embedding("transformer.wpe", context, rows_touched=context)
    for index in range(layers):
        name = f"transformer.h.{index}"
        text.norm(f"{name}.ln_1").fork().linear(f"{name}.attn.c_attn", 3 * width, transposed=True)
        text.attention().linear(f"{name}.attn.c_proj", width, transposed=True).norm(f"{name}.ln_2")
        text.linear(f"{name}.mlp.c_fc", 4 * width, transposed=True)
        text.linear(f"{name}.mlp.c_proj", width, transposed=True)
    return text.norm("transformer.ln_f").product(text.positions * width * vocab)
