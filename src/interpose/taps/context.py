"""Who is listening here and now: the scopes of this thread or task, and what is known of the forward pass under way.

Everything sits in one context variable, so a thread sees its own scopes only. Autograd's worker
threads (CUDA) have no context at all: recomputation there is given to the scopes that are live on
the module (see `tap.py`).
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


class Whereabouts(NamedTuple):
    """Where in a text a forward pass is.

    ``offset``: the position of its first token, None if that cannot be known. ``prompt``: how many positions
    belong to the prompt, if text is being generated. ``length``: how many tokens the pass has, if known.
    ``text``: what passes over one text share: the generation, or the cache they go on from. ``encodes``:
    whether an encoder reads something else.
    """

    offset: int | None = 0
    prompt: int | None = None
    length: int | None = None
    text: Any = None
    encodes: bool = False


class Frame:
    """One forward pass of one root module.

    ``counts``: calls heard so far, by listener. ``depth``: calls of the root under way.
    ``edited_under_checkpoint``: listeners whose edits a checkpoint will have to repeat in the
    backward pass. ``must_not_change``: tensors that nobody may write to any more, with their
    versions and sites. ``where``: where in the text it is. ``given``: the tokens and masks of the pass,
    by their names.
    """

    __slots__ = (
        "counts", "depth", "edited_under_checkpoint", "given", "must_not_change", "where",
    )  # fmt: skip

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.edited_under_checkpoint: list[Any] = []
        self.depth = 0
        self.must_not_change: list[tuple[Any, int, str]] = []
        self.where = Whereabouts()
        self.given: dict[str, Any] = {}

    def begin(self, model: Any, arguments: Mapping[str, Any]) -> None:
        """Note what is known of a pass from what the root is given."""
        self.where = model.whereabouts(arguments)
        self.given = {name: arguments[name] for name in _TEXT if arguments.get(name) is not None}


_TEXT = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")


class Context:
    """What this thread or task is inside of. Never changed: a new one takes its place."""

    __slots__ = ("frames", "scopes", "standing_down")

    def __init__(
        self,
        scopes: tuple[object, ...] = (),
        frames: Mapping[int, Frame] | None = None,
        *,
        standing_down: bool = False,
    ) -> None:
        self.scopes = scopes
        self.frames = frames or {}
        self.standing_down = standing_down


_STANDING_DOWN = Context(standing_down=True)
_NOWHERE = Context()
_CONTEXT: contextvars.ContextVar[Context] = contextvars.ContextVar("interpose", default=_NOWHERE)

current = _CONTEXT.get
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def enter(scope: object, root: object, *, frame: Frame | None) -> Context:
    """Let a scope hear the calls made from here on; with a frame, a forward pass begins with it."""
    here = current()
    frames = here.frames if frame is None else {**here.frames, id(root): frame}
    _CONTEXT.set(Context((*here.scopes, scope), frames, standing_down=here.standing_down))
    return here


def leave(scope: object, root: object, before: Context) -> None:
    """Undo `enter`, in whatever order scopes end."""
    here = current()
    scopes = tuple(other for other in here.scopes if other is not scope)
    frames = {key: frame for key, frame in here.frames.items() if key != id(root)}
    if id(root) in before.frames:
        frames[id(root)] = before.frames[id(root)]
    _CONTEXT.set(Context(scopes, frames, standing_down=here.standing_down))


def set_frame(root: object, frame: Frame | None) -> None:
    """A forward pass of this root begins, or (with None) has ended."""
    here = current()
    frames = {key: known for key, known in here.frames.items() if key != id(root)}
    if frame is not None:
        frames[id(root)] = frame
    _CONTEXT.set(Context(here.scopes, frames, standing_down=here.standing_down))


def frame_of(root: object) -> Frame:
    """The forward pass under way; a blank one when a part of a model is called on its own."""
    return current().frames.get(id(root)) or Frame()


def is_heard(scope: object | None, here: Context) -> bool:
    """Whether what belongs to a scope (None: to the model) hears calls made in a context."""
    return scope in here.scopes if scope is not None else not here.standing_down


def calls_under_way(module: nn.Module) -> int:
    """How many calls of a module are on this thread's stack: more than one if it calls itself."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count


_CALL = nn.Module._call_impl.__code__


def stand_down() -> contextvars.Token[Context]:
    """Before a user's function: what it calls in the model is not hooked, unless it opens a scope itself."""
    return _CONTEXT.set(_STANDING_DOWN)


stand_up = _CONTEXT.reset
"""After it: as before."""


@contextmanager
def unheard() -> Iterator[None]:
    """A ``with`` block in which no hook hears of what the model computes."""
    token = stand_down()
    try:
        yield
    finally:
        stand_up(token)


def in_scope(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs with the scopes open here, wherever it is called: in a thread, in a pool.

    Threads start with no scope, so hooks of a ``with`` block do not fire in them. Wrap what the
    thread runs:

        with model.hooks([...]):
            thread = Thread(target=ip.in_scope(train_step), args=(batch,))

    Grad mode and autocast are thread-local in PyTorch and do not travel along.
    """
    snapshot = contextvars.copy_context()

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # A context can be entered once at a time, so each call gets a copy of its own.
        return snapshot.copy().run(function, *args, **kwargs)

    return run


def in_autograd_thread() -> bool:
    """Whether this is one of autograd's own threads, which carry no context."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def under_checkpoint() -> bool:
    """Whether the code that called us runs inside `torch.utils.checkpoint`."""
    module = sys.modules.get("torch.utils.checkpoint")
    frame = sys._getframe(1) if module is not None else None
    while frame is not None:
        if frame.f_code.co_filename == module.__file__:  # type: ignore[union-attr]
            return True
        frame = frame.f_back
    return False
