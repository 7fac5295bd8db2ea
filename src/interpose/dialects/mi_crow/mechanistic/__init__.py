"""What mi-crow calls mechanistic: autoencoders, their concepts, and steering with them."""

from interpose.dialects.mi_crow.mechanistic import sae

__all__ = ["sae"]
