"""A model to use: from a run folder, a checkpoint, a Hugging Face folder or a Hugging Face name.

    model = Model.open("runs/tour")
    model.generate("The function", tokens=20)
    model.evaluate(text="book.txt")
    model.export("exported")

It is found and checked when it is opened, and loaded when it is first computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gristmill.base.errors import UserError
from gristmill.checkpoint.model import LoadedModel, StoredModel, chat_template, open_stored
from gristmill.distributed.device import select_device
from gristmill.evaluate.loss import evaluate_text, evaluation_ids
from gristmill.evaluate.results import EvaluationResult, with_check, write_result
from gristmill.evaluate.tasks import OpenTask, TaskOptions, open_tasks
from gristmill.generate.constraints import Constraint
from gristmill.generate.sampling import Sampling
from gristmill.generate.text import ChatGenerator, TextGenerator
from gristmill.strategies.precision import DTYPES, generation_dtype
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.chat.template import OWN, choose_template
from gristmill.track.folder import RunFolder

if TYPE_CHECKING:
    from gristmill.export.adapter import ExportedAdapter
    from gristmill.export.folder import Exported
    from gristmill.export.gguf import ExportedFile

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and how much there is."""


def _silent(doing: str, done: int, total: int) -> None:
    """Progress that nobody wants to see."""


class Model:
    """A model with its tokenizer."""

    def __init__(self, stored: StoredModel, *, device: str = "auto") -> None:
        self.stored, self._device = stored, device

    @classmethod
    def open(
        cls, source: str | Path, *, checkpoint: str | int = "latest", device: str = "auto"
    ) -> Model:
        """What `source` names. `checkpoint` chooses in a run folder: "latest" (the newest that is
        intact), "best" or a step; `device` is auto, cpu, cuda or mps."""
        return cls(open_stored(str(source), checkpoint=str(checkpoint)), device=device)

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model in memory."""
        return self.stored.load(select_device(self._device))

    @property
    def step(self) -> int | None:
        """The step of its checkpoint, if it comes from a run."""
        return self.stored.step

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know, such as that an older checkpoint was chosen."""
        return self.stored.notes

    # ------------------------------------------------------------------ generate

    def generate(self, prompt: str = "", *, cache: bool = True, **options: Any) -> str:
        """Continue a text; `options` are those of `stream`."""
        return "".join(self.stream(prompt, cache=cache, **options))

    def stream(
        self,
        prompt: str = "",
        *,
        tokens: int = 128,
        stop: str | Sequence[str] = (),
        cache: bool = True,
        regex: str | None = None,
        json_schema: Mapping[str, Any] | str | None = None,
        precision: str = "auto",
        **sampling: Any,
    ) -> Iterator[str]:
        """Continue a text, piece by piece: at most `tokens`, before one of the texts in `stop`. A
        text matches the whole of `regex`, or is JSON as `json_schema` describes it. `precision`:
        auto, fp32, bf16 or fp16. `sampling`: temperature, top_k and so on, as in `Sampling`."""
        pieces = self.text_generator(cache=cache, precision=precision).stream(
            prompt,
            tokens=tokens,
            sampling=Sampling(**sampling),
            stop=_several(stop),
            constraint=self.constraint(regex=regex, json_schema=json_schema),
        )
        return (text for _, text in pieces)

    def constraint(
        self, *, regex: str | None = None, json_schema: Mapping[str, Any] | str | None = None
    ) -> Constraint | None:
        """The form that texts must have, if one is given."""
        if regex is not None and json_schema is not None:
            what = "a text cannot match a regular expression and a schema"
            raise UserError(what, where="--regex", remedy="give one of the two")
        if regex is not None:
            return Constraint.regex(regex, self.stored.tokenizer)
        if json_schema is not None:
            return Constraint.json_schema(json_schema, self.stored.tokenizer)
        return None

    def text_generator(self, *, cache: bool = True, precision: str = "auto") -> TextGenerator:
        """What continues texts with this model, several at once if asked."""
        dtype = generation_dtype(precision, self.loaded.model.device)
        return TextGenerator(self.loaded.model, self.loaded.tokenizer, cached=cache, dtype=dtype)

    def chat(
        self,
        *,
        system: str | None = None,
        template: str | None = None,
        cache: bool = True,
        precision: str = "auto",
    ) -> ChatGenerator:
        """A conversation, by the model's own template unless another one is named."""
        tokenizer = self.stored.tokenizer
        if template is not None:
            chosen = choose_template(template, tokenizer, folders=(), where="--template")
            encoder = ChatEncoder(tokenizer, chosen, where="--template")
        elif (own := chat_template(self.stored)) is not None:
            encoder = ChatEncoder(tokenizer, own, where=own.name)
        else:
            raise UserError(
                "this model has no chat template: it was not trained on conversations",
                where=str(self.stored.run or self.stored.origin),
                remedy=f"choose one with --template {'|'.join(OWN)}|FILE, or leave --chat out",
            )
        dtype = generation_dtype(precision, self.loaded.model.device)
        return ChatGenerator(self.loaded.model, encoder, system=system, cached=cache, dtype=dtype)

    # ------------------------------------------------------------------ evaluate

    def evaluate(
        self,
        *,
        data: str | Sequence[str] = (),
        text: str | Sequence[str] = (),
        tasks: str | Sequence[str | OpenTask] = (),
        items: int | None = None,
        shots: int | None = None,
        limit: int | None = None,
        batch: int = 8,
        precision: str | Sequence[str] = "fp32",
        output: Path | None = None,
        progress: Progress = _silent,
    ) -> list[EvaluationResult]:
        """Loss, perplexity and bits per byte on token files (`data`) and text, and scores on tasks;
        without any of them, on the validation text of the model's run.

        `items`: only so many of each task; `shots`: examples before each question of a task of
        lm-evaluation-harness; `limit`: only so many tokens of each text; `batch`: windows computed
        at once; `precision`: fp32, bf16, fp16 or several. Each result is written as soon as it is
        there: into evals/ of the run that the model is from, and below the folder `output`.
        """
        for name in _several(precision):
            if name not in DTYPES:
                what, known = f"{name!r} is no number format", ", ".join(DTYPES)
                raise UserError(what, where="precision", remedy=f"one of {known}")
        given = [tasks] if isinstance(tasks, str) else list(tasks)
        opened: list[OpenTask] = [task for task in given if not isinstance(task, str)]
        if named := [task for task in given if isinstance(task, str)]:
            opened += open_tasks(named, TaskOptions(items, shots))
        texts = [evaluation_ids(self.loaded, data=path) for path in _several(data)]
        texts += [evaluation_ids(self.loaded, text=[path]) for path in _several(text)]
        if not texts and not opened:
            texts = [evaluation_ids(self.loaded)]
        results = list[EvaluationResult]()
        for compute in _several(precision):
            self.loaded.model.compute = DTYPES[compute]
            for chosen in texts:
                result = evaluate_text(
                    self.loaded, chosen, batch=batch, limit=limit, progress=progress
                )
                settings = {"batch": batch, "limit": limit}
                results.append(self._keep(result, compute, settings, output))
            for task in opened:
                settings = {"items": items, "shots": shots}
                for result in task.run(self.loaded, progress):
                    results.append(self._keep(result, compute, settings, output))
        return results

    def _keep(
        self,
        result: EvaluationResult,
        precision: str,
        settings: dict[str, int | None],
        output: Path | None,
    ) -> EvaluationResult:
        """Write a result, and say where it is."""
        run = self.stored.run
        result = with_check(replace(result, precision=precision, settings=settings), run)
        folders = [] if run is None else [RunFolder(run).evals]
        if output is not None:
            # Results of several models must not overwrite each other.
            folders.append(output / (run or self.stored.origin).name)
        files = [write_result(folder, result, self.loaded) for folder in folders]
        return replace(result, files=tuple(files))

    # ------------------------------------------------------------------ export

    def export(
        self,
        place: str | Path,
        *,
        code: bool = False,
        adapter: bool = False,
        check: Literal["auto", "transformers", "files"] = "auto",
        progress: Progress = _silent,
    ) -> Exported | ExportedFile | ExportedAdapter:
        """Write a folder that transformers loads, or a file for llama.cpp if `place` ends in .gguf,
        and check it. `code`: with the model's own code, for models that no class of transformers
        can be; `adapter`: the adapters of a run with model.lora alone; `check`: how thoroughly."""
        # Imported late: most models are never exported, and every training run imports this.
        from gristmill.export.adapter import export_adapter
        from gristmill.export.folder import export
        from gristmill.export.gguf import SUFFIX, export_gguf

        place = Path(place)
        as_gguf = place.suffix == SUFFIX
        if as_gguf and code:
            raise UserError("a GGUF file holds no code", where="--code", remedy="give a folder")
        if as_gguf and check == "transformers":
            what = "a GGUF file is not compared with transformers"
            raise UserError(what, where="--check", remedy="leave it out")
        if adapter and (as_gguf or code or check != "auto"):
            what = (
                "adapters are written as a folder, without code, and always checked with their base"
            )
            remedy = "give a folder, and no --code or --check"
            raise UserError(what, where="--adapter", remedy=remedy)
        if adapter:
            return export_adapter(self.stored, place)
        if as_gguf:
            return export_gguf(self.stored, place, progress=progress)
        return export(self.stored, place, code=code, check=check, progress=progress)


def _several(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given
