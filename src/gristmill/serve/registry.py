"""The models of a server: found by name, loaded when asked for, dropped when others need the room.

    NAME         the model; of a run folder its newest checkpoint, also one that is saved later
    NAME@STEP    a checkpoint of a run folder

A request borrows a model and gives it back. A model that is borrowed is never dropped. When a run
has saved a newer checkpoint, it is loaded beside the old one and takes its place: requests that
have begun go on with the old one, which is dropped after the last of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gristmill.base.errors import UserError, on_one_line
from gristmill.checkpoint.layout import CheckpointFolder, find_step, step_of, verify
from gristmill.distributed.device import select_device
from gristmill.model import Model
from gristmill.models.spec import CausalLM
from gristmill.serve.metrics import Metrics
from gristmill.serve.served import LoadOptions, OpenedModel, ServedModel
from gristmill.track.folder import RunFolder
from gristmill.web.refusals import RefusalError, bad_request

Result = TypeVar("Result")
_END_SECONDS = 10.0
FOLLOW_SECONDS = 3.0
"""How often a run folder is looked at for newer checkpoints."""


@dataclass(frozen=True)
class ModelInfo:
    """A line of the list of models."""

    id: str
    created: int
    context: int
    chat: bool
    parameters: int | None
    loaded: bool
    step: int | None
    run: str | None


@dataclass
class _Entry:
    """What a name stands for."""

    id: str
    source: str
    checkpoint: str = "latest"
    folder: CheckpointFolder | None = None
    """Where newer checkpoints would be."""
    run: str | None = None
    path: Path | None = None
    """The folder of a single checkpoint."""
    opened: OpenedModel | None = None
    served: ServedModel | None = None
    loading: asyncio.Task[ServedModel] | None = None
    wanted: int = 0
    """Requests that have it or wait for it: two models that were just loaded would otherwise be
    dropped for each other, again and again."""
    seen: list[str] = field(default_factory=list)
    """The checkpoints that were there when the newest was looked for."""

    @property
    def has_gone(self) -> bool:
        """Whether a checkpoint was deleted that is not in memory."""
        return self.served is None and self.path is not None and not self.path.is_dir()


def no_model(id: str) -> RefusalError:
    """The refusal of a name that no model has."""
    what = f"there is no model {id[:200]!r}; /v1/models has the names"
    return RefusalError(404, what, param="model", code="model_not_found")


class Registry:
    """All models."""

    def __init__(
        self,
        *,
        options: LoadOptions,
        most_loaded: int,
        metrics: Metrics,
        log: Callable[[str], None],
    ) -> None:
        self._options, self._most, self._metrics, self._log = options, most_loaded, metrics, log
        self._entries: dict[str, _Entry] = {}
        self._clock = itertools.count(1)
        self._retired = list[ServedModel]()
        """Replaced by newer ones, but still in use."""
        # One at a time, so that there is room for each.
        self._one_load = asyncio.Lock()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="gristmill loader")
        self._returned = asyncio.Condition()

    # ------------------------------------------------------------------ names

    def add(self, given: str) -> None:
        """Add a model by what the command line says: a source, or NAME=SOURCE."""
        name, separator, source = given.partition("=")
        if not separator or "/" in name or Path(given).exists():
            name, source = "", given
        _refuse_step(source)
        model = Model.open(source)
        stored = model.stored
        run = None if stored.run is None else stored.run.resolve()
        is_run = (Path(source) / "run.toml").is_file()
        if not name:
            name = Path(source.rstrip("/").partition("@")[0]).resolve().name
            if run is not None:
                name = run.name if is_run else f"{run.name}@{model.step}"
        elif "@" in name:
            raise UserError("a name holds no @, which is for steps", where=given)
        if name in self._entries:
            raise UserError(
                f"two models are called {name!r}", where=given, remedy="choose one with NAME=SOURCE"
            )
        for note in model.notes:
            self._log(f"{name}: {on_one_line(note)}")
        folder = CheckpointFolder(RunFolder(run).checkpoints) if is_run and run else None
        entry = _Entry(name, source, folder=folder, run=None if run is None else run.name)
        entry.opened = OpenedModel.of(model, self._options)
        entry.seen = _names(folder)
        self._entries[name] = entry

    @property
    def names(self) -> list[str]:
        """The models that the command line names."""
        return [entry.id for entry in self._entries.values() if entry.checkpoint == "latest"]

    def find(self, id: str | None) -> _Entry:
        """What a name stands for."""
        if id is None:
            if len(self.names) == 1:
                return self._entries[self.names[0]]
            names = ", ".join(self.names)
            raise bad_request(f"model is missing: it must be one of {names}", param="model")
        known = self._entries.get(id)
        if known is not None and not known.has_gone:
            return known
        name, _, step = id.rpartition("@")
        parent = self._entries.get(name)
        if parent is not None and parent.folder is not None and step.isdigit() and len(step) < 12:
            number = str(int(step))
            path = parent.folder.path(int(step))
            if number == step and path.is_dir():
                entry = _Entry(id, parent.source, number, run=parent.run, path=path)
                self._entries[id] = entry
                return entry
        raise no_model(id)

    async def infos(self) -> list[ModelInfo]:
        """The models, each with the older checkpoints of its run."""
        infos = []
        for name in self.names:
            entry = self._entries[name]
            opened = entry.served.opened if entry.served else entry.opened
            assert opened is not None
            infos.append(self._info(name, entry, opened, opened.step))
            if entry.folder is None:
                continue
            for step in await asyncio.to_thread(_whole_steps, entry.folder):
                if step != opened.step:
                    infos.append(self._info(f"{name}@{step}", entry, opened, step))
        return infos

    def _info(self, id: str, entry: _Entry, opened: OpenedModel, step: int | None) -> ModelInfo:
        own = self._entries.get(id)
        origin = opened.stored.origin
        if entry.folder is not None and step is not None:
            origin = entry.folder.path(step)
        try:
            created = int(origin.stat().st_mtime)
        except OSError:
            created = 0
        return ModelInfo(
            id=id,
            created=created,
            context=opened.context,
            chat=opened.encoder is not None,
            parameters=opened.parameters,
            loaded=own is not None and own.served is not None,
            step=step,
            run=entry.run,
        )

    async def opened(self, id: str | None) -> OpenedModel:
        """A model's tokenizer and settings, which do not need it in memory."""
        entry = self.find(id)
        if entry.served is not None:
            return entry.served.opened
        if entry.opened is None:
            await self._in_loader(lambda: self._open(entry))
        assert entry.opened is not None
        return entry.opened

    # ------------------------------------------------------------------ models in memory

    @property
    def loaded(self) -> list[ServedModel]:
        """The models in memory."""
        served = (entry.served for entry in self._entries.values())
        return [*(one for one in served if one is not None), *self._retired]

    @contextlib.asynccontextmanager
    async def borrow(self, id: str | None) -> AsyncIterator[ServedModel]:
        """A model, loaded if need be."""
        entry = self.find(id)
        entry.wanted += 1
        try:
            while (served := entry.served) is None:
                if entry.loading is None:
                    entry.loading = asyncio.create_task(self._load(entry))
                    entry.loading.add_done_callback(lambda task: self._loaded(entry, task))
                # Whoever asked first may leave.
                await asyncio.shield(entry.loading)
            served.users, served.used = served.users + 1, next(self._clock)
            try:
                yield served
            finally:
                served.users -= 1
                self._drop_retired()
        finally:
            entry.wanted -= 1
            async with self._returned:
                self._returned.notify_all()

    def _loaded(self, entry: _Entry, task: asyncio.Task[ServedModel]) -> None:
        entry.loading = None
        if not task.cancelled():
            task.exception()  # told to those who wait

    async def _load(self, entry: _Entry) -> ServedModel:
        try:
            async with self._one_load:
                await self._make_room()
                opened, model = await self._in_loader(lambda: self._read(entry))
                entry.served = self._serve(entry, opened, model)
        except UserError as error:
            self._log(f"{entry.id} cannot be loaded: {on_one_line(str(error))}")
            what = f"the model {entry.id} cannot be loaded; the server's log says why"
            raise RefusalError(503, what, param="model", code="model_unusable") from error
        except Exception as error:
            reason = on_one_line(f"{type(error).__name__}: {error}")
            self._log(f"{entry.id} cannot be loaded: {reason}")
            what = f"the model {entry.id} cannot be loaded; the server's log says why"
            raise RefusalError(500, what, param="model", code="model_unusable") from error
        return entry.served

    def _serve(self, entry: _Entry, opened: OpenedModel, model: CausalLM) -> ServedModel:
        entry.opened = opened
        served = ServedModel(entry.id, opened, model, options=self._options, log=self._log)
        served.used = next(self._clock)
        self._metrics.loads += 1
        self._log(f"loaded {served.described()}")
        return served

    def _read(self, entry: _Entry) -> tuple[OpenedModel, CausalLM]:
        """Open and load, in the loader's thread."""
        opened = self._open(entry)
        return opened, self._to_memory(opened)

    def _open(self, entry: _Entry) -> OpenedModel:
        seen = _names(entry.folder)
        if entry.opened is None or seen != entry.seen:
            # Also if it fails: a damaged checkpoint is not read again every few seconds.
            entry.seen = seen
            model = Model.open(entry.source, checkpoint=entry.checkpoint)
            for note in model.notes:
                self._log(f"{entry.id}: {on_one_line(note)}")
            entry.opened = OpenedModel.of(model, self._options)
        return entry.opened

    def _to_memory(self, opened: OpenedModel) -> CausalLM:
        return opened.stored.load(select_device(self._options.device)).model

    async def _in_loader(self, act: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._loader, act)

    async def _make_room(self) -> None:
        """Drop models until one more may be loaded; wait if all are in use."""
        async with self._returned:
            while len(self.loaded) >= self._most:
                idle = [
                    entry
                    for entry in self._entries.values()
                    if entry.served is not None and not entry.wanted
                ]
                if idle:
                    self._drop(
                        min(idle, key=lambda entry: entry.served.used if entry.served else 0)
                    )
                else:
                    await self._returned.wait()

    def _drop(self, entry: _Entry) -> None:
        assert entry.served is not None
        self._log(f"dropped {entry.id}")
        entry.served.close()
        entry.served = None

    def _drop_retired(self) -> None:
        for served in [one for one in self._retired if not one.users]:
            served.close()
            self._retired.remove(served)

    def close(self) -> None:
        """End all threads."""
        for served in self.loaded:
            served.worker.close()
        for served in self.loaded:
            # A thread that computes while the program ends could crash it.
            served.worker.join(_END_SECONDS)
        self._loader.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ newer checkpoints

    async def follow(self, seconds: float = FOLLOW_SECONDS) -> None:
        """Look for newer checkpoints of loaded models again and again."""
        while True:
            await asyncio.sleep(seconds)
            await self.take_over()

    async def take_over(self) -> None:
        """Replace models of which there is a newer checkpoint."""
        for entry in list(self._entries.values()):
            if entry.folder is not None and entry.served is not None:
                try:
                    await self._take_over(entry)
                except UserError as error:
                    self._log(f"{entry.id}: {on_one_line(str(error))}")
                except Exception as error:
                    reason = on_one_line(f"{type(error).__name__}: {error}")
                    self._log(f"{entry.id}: a newer checkpoint cannot be loaded: {reason}")

    async def _take_over(self, entry: _Entry) -> None:
        names = await asyncio.to_thread(_names, entry.folder)
        if names[-1:] == entry.seen[-1:]:
            return
        opened = await self._in_loader(lambda: self._open(entry))
        old = entry.served
        if old is None or opened.step == old.opened.step:
            return
        model = await self._in_loader(lambda: self._to_memory(opened))
        if (old := entry.served) is None:
            return
        entry.served = self._serve(entry, opened, model)
        self._retired.append(old)
        self._drop_retired()


def _refuse_step(source: str) -> None:
    """Clients say RUN@STEP, so people try it here, where it would be taken for a name on the
    Hub."""
    run, separator, step = source.rpartition("@")
    if separator and (Path(run) / "run.toml").is_file() and not Path(source).exists():
        raise UserError(
            f"{run} is a run folder, whose checkpoints are all served",
            where=source,
            remedy=f"give {run}, and let clients ask for {Path(run).resolve().name}@{step}",
        )


def _names(folder: CheckpointFolder | None) -> list[str]:
    """The checkpoints that are there."""
    return [] if folder is None else [path.name for path in folder.committed()]


def _whole_steps(folder: CheckpointFolder) -> Sequence[int]:
    """The steps of checkpoints whose files are there in full size, the newest first. Whether every
    byte is good is found when one is loaded."""
    paths = [path for path in folder.committed() if find_step(path) is not None]
    return [step_of(path) for path in reversed(paths) if not verify(path, read=lambda name: False)]
