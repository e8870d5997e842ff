"""A model that is in memory and answers requests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gristmill.base.errors import UserError
from gristmill.base.units import format_bytes
from gristmill.checkpoint.model import StoredModel, chat_template
from gristmill.generate.engine import Engine
from gristmill.model import Model
from gristmill.models.decoding import affordable_slots
from gristmill.models.spec import CausalLM
from gristmill.serve.token_texts import TokenTexts
from gristmill.serve.worker import Worker
from gristmill.strategies.precision import generation_dtype
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.chat.template import choose_template
from gristmill.text.tokenizers.tokenizer import Tokenizer

SLOTS = 64
"""Sequences at once, if nothing is said and memory allows."""


@dataclass(frozen=True)
class LoadOptions:
    """How models are loaded."""

    device: str = "auto"
    precision: str = "auto"
    """The format of activations and weights: fp32, bf16, fp16, or auto."""
    slots: int | None = None
    context: int | None = None
    """Tokens of a prompt and its answer, if fewer than the model's own."""
    template: str | None = None
    """A chat template for all models."""
    queue: int = 256
    """Requests that may wait for a slot."""


@dataclass(frozen=True)
class OpenedModel:
    """A model on disk, and what can be said about it before it is loaded."""

    stored: StoredModel
    context: int
    parameters: int
    encoder: ChatEncoder | None
    """How conversations become ids; None for a model that was not trained on any."""
    texts: TokenTexts

    @classmethod
    def of(cls, model: Model, options: LoadOptions) -> OpenedModel:
        stored = model.stored
        context = min(stored.config.context, options.context or stored.config.context)
        parameters = sum(one.numel() for one in stored.meta_model().parameters())
        encoder = _encoder(stored, options.template)
        return cls(stored, context, parameters, encoder, TokenTexts(stored.tokenizer))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.stored.tokenizer

    @property
    def known(self) -> int:
        """How many ids there are."""
        return min(self.tokenizer.size, self.stored.vocab)

    @property
    def step(self) -> int | None:
        return self.stored.step


def _encoder(stored: StoredModel, template: str | None) -> ChatEncoder | None:
    tokenizer = stored.tokenizer
    if template is not None:
        chosen = choose_template(template, tokenizer, folders=(), where="--template")
        return ChatEncoder(tokenizer, chosen, where="--template")
    own = chat_template(stored)
    try:
        return None if own is None else ChatEncoder(tokenizer, own, where=own.name)
    except UserError:
        # A template that cannot be used is no reason to refuse completions.
        return None


class ServedModel:
    """A model in memory."""

    def __init__(
        self,
        name: str,
        opened: OpenedModel,
        model: CausalLM,
        *,
        options: LoadOptions,
        log: Callable[[str], None],
    ) -> None:
        """To be called in the event loop, with a model that was loaded in another thread."""
        self.name, self.opened, self.model = name, opened, model
        self.texts, self.context, self.encoder = opened.texts, opened.context, opened.encoder
        self.tokenizer, self.known = opened.tokenizer, opened.known
        self.dtype = generation_dtype(options.precision, model.device)
        wanted = options.slots or SLOTS
        self.slots = affordable_slots(model, wanted, capacity=self.context, dtype=self.dtype)
        self.most_pending = self.slots + options.queue
        self.users = 0
        """Requests that hold it."""
        self.used = 0
        """When it was last asked for."""
        self.worker = Worker(self._build, log=log)

    def _build(self) -> Engine:
        return Engine(
            self.model,
            slots=self.slots,
            capacity=self.context,
            ids=self.tokenizer.size,
            dtype=self.dtype,
        )

    def described(self) -> str:
        """What it takes, for the log."""
        weights = sum(one.numel() * one.element_size() for one in self.model.parameters())
        slots = self.slots * self.model.slot_bytes(self.context, dtype=self.dtype)
        step = "" if self.opened.step is None else f" step {self.opened.step},"
        return (
            f"{self.name}:{step} {self.slots} slots of {self.context} tokens in "
            f"{str(self.dtype).removeprefix('torch.')}, weights {format_bytes(weights)}, "
            f"slots {format_bytes(slots)}"
        )

    def close(self) -> None:
        """Give its memory back, in the background."""
        worker, cuda = self.worker, self.model.device.type == "cuda"
        worker.close()

        def finish() -> None:
            worker.join()
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()

        threading.Thread(target=finish, daemon=True).start()
