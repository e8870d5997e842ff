"""Rules about mixtures over time, and about further sets of validation text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from gristmill.base.errors import Problem
from gristmill.base.units import parse_split
from gristmill.config.layouts import ramp_problems
from gristmill.config.mixture import StageConfig, find_sources, resolve_stages, source_names
from gristmill.config.resolve import portions, resolve
from gristmill.config.schema import DataConfig, RunConfig
from gristmill.config.settings import no_effect


def mixture_fits(config: RunConfig) -> Iterator[Problem]:
    """What does not fit together in the stages and limits of a mixture."""
    data = config.data
    limits = data.max_epochs
    if data.by_rows:
        for name in ("stage", "max_epochs"):
            if getattr(data, name) is not None:
                what = "Megatron's order mixes its sets in its own way, the same over the whole run"
                yield Problem(what, f"data.{name}", 'leave it out, or set data.order = "shuffled"')
        return
    if isinstance(limits, dict):
        yield from _unknown_names(limits, data, "data.max_epochs")
    if limits is not None and data.blend == "exhaustive":
        what = "reads every sample once per epoch, so no source can run dry before the others"
        yield Problem(what, "data.blend", "leave one of it and data.max_epochs out")
    if data.stage is None:
        return
    broken = list(_stages_fit(config, data.stage))
    yield from broken
    if not broken:
        broken = list(_borders_fit(config, data.stage))
        yield from broken or _empty_stages(config)


def _stages_fit(config: RunConfig, stages: tuple[StageConfig, ...]) -> Iterator[Problem]:
    data = config.data
    if not stages:
        yield Problem("there are no stages in it", "data.stage", "leave it out")
        return
    if len(data.sources) == 1:
        yield no_effect("data.stage", "on a single token set")
        return
    if isinstance(data.paths, dict):
        what = "the stages say how much of each source is read, so these weights cannot apply"
        yield Problem(what, "data.paths", "write the paths as a list")
    if data.blend is not None:
        yield no_effect("data.blend", "beside data.stage")
    for number, stage in enumerate(stages):
        yield from _unknown_names(stage.weights, data, f"data.stage.{number}.weights")
    if stages[0].gradual:
        what = "the first stage has none before it whose shares could change"
        yield Problem(what, "data.stage.0.gradual", "leave it out, or write a stage before it")


def _unknown_names(names: Iterable[str], data: DataConfig, where: str) -> Iterator[Problem]:
    known, meant = source_names(data.sources), dict[int, str]()
    for name in names:
        found = find_sources(name, data.sources)
        if not found:
            near = difflib.get_close_matches(name, known, n=2) or known
            remedy = f"data.paths has {' and '.join(near)}"
            yield Problem(f"there is no source {name!r}", where, remedy)
        elif len(found) > 1:
            remedy = f"write {' or '.join(known[number] for number in found)}"
            yield Problem(f"{name!r} may be any of {len(found)} sources", where, remedy)
        elif found[0] in meant:
            what = f"{meant[found[0]]!r} and {name!r} are the same source"
            yield Problem(what, where, "name it once")
        else:
            meant[found[0]] = name


def _borders_fit(config: RunConfig, stages: tuple[StageConfig, ...]) -> Iterator[Problem]:
    """Stages follow each other without gaps, from the start of the run to its end."""
    parts = portions(config.train)
    if isinstance(parts, Problem) or any(ramp_problems(config.train, parts)):
        return
    resolved = resolve(config, vocab=1)
    last = len(stages) - 1
    for number, stage in enumerate(stages):
        where, named = f"data.stage.{number}", f"stage {number + 1}"
        begin = None if stage.begin is None else resolved.samples_of(stage.begin)
        end = None if stage.to is None else resolved.samples_of(stage.to)
        if number == 0 and begin:
            what = f"nothing is said of the {begin} samples before the first stage"
            yield Problem(what, f"{where}.from", "leave it out: the first stage begins at 0")
        if number == last and end is not None and end < resolved.samples:
            what = f"the last stage ends at sample {end}, and the run at sample {resolved.samples}"
            yield Problem(what, f"{where}.to", "leave it out: the last stage ends with the run")
        if end is not None and end > resolved.samples:
            what = f"{named} ends at sample {end}, after the run's end at {resolved.samples}"
            yield Problem(what, f"{where}.to", "shorten it, or raise train.until")
        if number == last:
            continue
        after = stages[number + 1].begin
        following = None if after is None else resolved.samples_of(after)
        if end is None and following is None:
            what = f"nothing says where {named} ends"
            yield Problem(what, where, 'give it a `to`, such as to = 0.75 or to = "15B tokens"')
        elif end is not None and following is not None and end != following:
            what = f"overlaps {named}, which ends at sample {end}: it begins at sample {following}"
            if following > end:
                what = (
                    f"nothing is said of the samples {end} to {following}, between {named} and "
                    "the next one"
                )
            yield Problem(what, f"data.stage.{number + 1}.from", "leave it out, or correct it")
        elif end is None and following is not None and following > resolved.samples:
            what = f"begins at sample {following}, after the run's end at {resolved.samples}"
            yield Problem(what, f"data.stage.{number + 1}.from", "shorten it, or raise train.until")


def _empty_stages(config: RunConfig) -> Iterator[Problem]:
    parts = portions(config.train)
    if isinstance(parts, Problem) or any(ramp_problems(config.train, parts)):
        return
    for number, stage in enumerate(resolve_stages(config.data, resolve(config, vocab=1))):
        if stage.end <= stage.begin:
            what = (
                f"stage {number + 1} would be from sample {stage.begin} to sample {stage.end}, and "
                "has no samples"
            )
            yield Problem(what, f"data.stage.{number}.to", "write the stages in their order")


def validation_sets_fit(config: RunConfig) -> Iterator[Problem]:
    """What is wrong with the further sets of validation text."""
    names = list[str]()
    for number, one in enumerate(config.validation.sets or ()):
        if one.name in names:
            what = f"there are two sets called {one.name!r}"
            yield Problem(what, f"validate.set.{number}.name", "give each its own name")
        names.append(one.name)
    if config.validation.sets is None:
        return
    if not names:
        yield Problem("there are no sets in it", "validate.set", "leave it out")
    data = config.data
    shares = None if data.split is None else parse_split(data.split)
    if data.validation is None and shares is not None and not shares[1]:
        what = f'sets come beside the main validation, and data.split = "{data.split}" holds no '
        remedy = "name its text with data.validation, or give it a share in data.split"
        yield Problem(what + "text out for that", "validate.set", remedy)
