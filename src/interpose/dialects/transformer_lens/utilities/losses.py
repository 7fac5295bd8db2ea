"""Loss and accuracy of next-token prediction."""

from __future__ import annotations

from torch import Tensor

from interpose.models.running.forward import next_token_loss


def lm_cross_entropy_loss(
    logits: Tensor,
    tokens: Tensor,
    attention_mask: Tensor | None = None,
    per_token: bool = False,
) -> Tensor:
    """Minus the log probability of each next token: the mean, or [batch, pos - 1] with ``per_token``.

    Args:
        logits: [batch, pos, d_vocab].
        tokens: [batch, pos]; the first of each text is predicted by nothing.
        attention_mask: 1 for text, 0 for padding, [batch, pos]. A prediction counts if it is from
            text and of text; others are 0 and not in the mean.
        per_token: give the loss of every position.
    """
    _check(logits, tokens)
    return next_token_loss(logits, tokens, attention_mask, per_token)


def lm_accuracy(logits: Tensor, tokens: Tensor, per_token: bool = False) -> Tensor:
    """How often the likeliest next token is the right one: the share, or [batch, pos - 1] with ``per_token``.

    Args:
        logits: [batch, pos, d_vocab].
        tokens: [batch, pos].
        per_token: give True or False for every position.
    """
    _check(logits, tokens)
    right = logits[..., :-1, :].argmax(-1) == tokens[..., 1:]
    return right if per_token else right.float().mean()


def _check(logits: Tensor, tokens: Tensor) -> None:
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits {list(logits.shape)} are not of tokens {list(tokens.shape)}: logits are "
            "[batch, pos, d_vocab] for tokens [batch, pos]."
        )
