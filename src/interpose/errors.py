"""Everything interpose raises. Each error says what was asked, where it failed, what is there, what to write.

InterposeError
├── SiteNotFound      (KeyError)      a name that is nowhere in the model
├── NothingMatched    (KeyError)      a glob, regex or callable that selects no site
├── AmbiguousSite     (KeyError)      a name that means several tensors
├── NeverFired        (RuntimeError)  a hook whose site was never reached
├── EditError         (ValueError)    an edit the model cannot take
│   └── EditShapeError                its shape, dtype kind, device or container is wrong
├── NothingSelected   (ValueError)    a selector that means no part of a value
├── FileError         (ValueError)    a file, or data as files have it, that is not what it should be
├── NonFinite         (ValueError)    a value or gradient with NaN or Inf, where one was looked for
├── StaleValue        (RuntimeError)  a value kept without a copy was changed since
├── GradientError     (RuntimeError)  a gradient that cannot be had, or would be wrong
├── Cancelled         (RuntimeError)  a long job that was told to end
├── WorkerDied        (RuntimeError)  processes of a cluster that die again and again
└── Unsupported       (TypeError)     a module or value that cannot be hooked, and why
"""

from __future__ import annotations

from typing import Any


class InterposeError(Exception):
    """Parent of all errors of this library; catch it to catch them all."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which would show newlines as \\n.
        return str(self.args[0]) if self.args else ""


class SiteNotFound(InterposeError, KeyError):
    """A name that is nowhere in the model."""


class NothingMatched(InterposeError, KeyError):
    """A glob, regex or callable that selects no site."""


class AmbiguousSite(InterposeError, KeyError):
    """A name that means several tensors."""


class NeverFired(InterposeError, RuntimeError):
    """A hook whose site was never reached."""


class EditError(InterposeError, ValueError):
    """An edit the model cannot take."""


class EditShapeError(EditError):
    """An edit of the wrong shape, dtype kind, device or container."""


class NothingSelected(InterposeError, ValueError):
    """A selector that means no part of a value."""


class FileError(InterposeError, ValueError):
    """A file, or data as files have it, that is not what it should be; or a place where no file can be written."""

    field: str = ""
    """Which field is wrong, such as ``edits[0].layer``."""


class NonFinite(InterposeError, ValueError):
    """A NaN or Inf where `check_finite` or a `NaNGuard` looks for them."""


class StaleValue(InterposeError, RuntimeError):
    """A value kept with ``clone=False`` that the model has changed since."""


class GradientError(InterposeError, RuntimeError):
    """A gradient that cannot be had, or that would be wrong."""


class Cancelled(InterposeError, RuntimeError):
    """A long job that was told to end. Nothing of it is left on the model.

    Attributes:
        result: what was done until then, where the job keeps that: its own result, with NaN for what was not run.
    """

    result: Any = None


class WorkerDied(InterposeError, RuntimeError):
    """Processes of a cluster that die again and again at the same piece of work."""


class Unsupported(InterposeError, TypeError):
    """A module or a value that cannot be hooked."""
