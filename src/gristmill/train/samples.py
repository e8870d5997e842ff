"""The hook that generates samples: the model continues the prompts of the run file.

They are records of the run and are also written to `samples/step-XXXXXXXX.txt` in its folder.
Rank 0 generates with the whole model, which all processes gather.
"""

from __future__ import annotations

from pathlib import Path

from gristmill.base.errors import UserError
from gristmill.base.files import write_atomic
from gristmill.checkpoint.state import TrainState
from gristmill.config.schema import SampleConfig
from gristmill.generate.sampling import Sampling
from gristmill.generate.text import TextGenerator
from gristmill.strategies.strategy import Strategy
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.track.folder import RunFolder
from gristmill.train.meter import StepEvent
from gristmill.train.tracker import Tracker


class Sample:
    """Generates text from the prompts of the run file."""

    phase = "samples"

    def __init__(
        self,
        config: SampleConfig,
        *,
        strategy: Strategy,
        tokenizer: Tokenizer,
        tracker: Tracker,
        state: TrainState,
        seed: int,
        folder: RunFolder,
        chat: ChatEncoder | None = None,
    ) -> None:
        """With `chat`, prompts are messages of a user, and samples are the answers."""
        self.config, self.tracker, self.state, self.folder = config, tracker, state, folder
        self.chat = chat
        self.strategy, self.tokenizer = strategy, tokenizer
        self.sampling = Sampling(config.temperature, config.top_k, config.top_p, seed)
        self._done_at: int | None = None

    def at_start(self) -> None:
        self._write()

    def due(self, event: StepEvent) -> bool:
        return self.config.every.due(event.before, event.after)

    def act(self, event: StepEvent) -> None:
        self._write()

    def at_end(self, *, finished: bool) -> None:
        step = self.state.progress.steps
        # They may exist if an earlier start was lost after writing them, before the run completed.
        if finished and self._done_at != step and not self._file(step).is_file():
            self._write()

    def _file(self, step: int) -> Path:
        return self.folder.samples / f"step-{step:08d}.txt"

    def _write(self) -> None:
        step = self._done_at = self.state.progress.steps
        model = self.strategy.gather_full_model()
        if model is None:
            return
        ends = () if self.chat is None else self.chat.ends
        generator, pages = TextGenerator(model, self.tokenizer, ends=ends), []
        try:
            for prompt in self.config.prompts:
                asked: str | list[int] = prompt
                if self.chat is not None and prompt:
                    asked = self.chat.encode_prompt([Message("user", prompt)])
                (text,) = generator.texts(asked, tokens=self.config.tokens, sampling=self.sampling)
                self.tracker.sample(prompt, text)
                pages.append(f"{prompt}{'' if asked == prompt else chr(10)}{text}\n")
            self.folder.require_here()
            write_atomic(self._file(step), "---\n".join(pages))
        except UserError as error:
            self.tracker.say(f"the samples were not written: {error}", level="warning")
