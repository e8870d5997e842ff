"""Keys of decentralized GPT-2 that mean something only together."""

from __future__ import annotations

import os
from pathlib import Path

from gristmill.dialects.draft import TranslationDraft, run_name


def optimizer(draft: TranslationDraft) -> None:
    """AdamW, or AccumAdamW with its number of steps."""
    kind = draft.choice("train.optim.name")
    accumulates = kind == "accum-adamw"
    draft.set("optim.type", kind, "train.optim.name")
    betas = draft.get("train.optim.betas") or ([0.9, 0.98] if accumulates else [0.9, 0.95])
    for number, beta in enumerate(betas, 1):
        draft.set(f"optim.beta{number}", beta, "train.optim.betas")
    if accumulates:
        draft.take("optim.accum", "train.optim.accum_steps")
    elif draft.given("train.optim.accum_steps"):
        draft.refuse("only accumadamw has it", "train.optim.accum_steps", "leave it out")


def exchange(draft: TranslationDraft) -> None:
    """Gossip, or gradients summed over all processes."""
    if draft.get("train.backend") == "decentdp":
        topology = draft.choice("train.topology")
        draft.set("parallel.gossip.topology", topology, "train.topology", "train.backend")
        # As in decent-dp 0.1.2, with which the published runs were made.
        draft.set("parallel.exchange.average", "keep", "train.backend")
        if draft.given("train.grad_norm_clip"):
            text = "the norm is that of the whole gradient, not of each bucket"
            draft.change("train.grad_norm_clip", text)
    elif draft.given("train.backend") and draft.get("train.backend") == "pytorchddp":
        draft.ignore("train.backend", "gradients are summed over all processes in any case")
    if draft.get("train.backend") != "decentdp" and draft.given("train.topology"):
        draft.ignore("train.topology", "only the backend decentdp has one")
    if draft.get("train.backend") not in ("decentdp", "pytorchddp"):
        draft.refuse("is no backend", "train.backend", "give decentdp or pytorchddp")


def folder(draft: TranslationDraft) -> None:
    """Where the run lies, where its tokens are, and how often it validates and saves."""
    log, data = draft.get("log_dir"), draft.get("data_dir")
    # Theirs is named for the job, of which there is a new one at every start.
    own = run_name(Path(draft.words[-1]).stem, "decentralized")
    draft.set("name", own, "log_dir")
    draft.set("folder", os.path.join(log, own), "log_dir")
    draft.changed_once("log_dir", "the run's folder in it is named for the file, not for the job")
    for setting, part in (("paths", "train"), ("validation", "val")):
        draft.set(f"data.{setting}", os.path.join(data, part), "data_dir")
    every = f"{draft.get('log.eval_interval')} steps"
    windows = draft.get("log.eval_steps") * draft.get("train.global_batch_size")
    draft.set("validate.every", every, "log.eval_interval")
    for setting in ("windows", "train_windows"):
        names = ("log.eval_steps", "train.global_batch_size")
        draft.set(f"validate.{setting}", windows, *names)
    draft.set("checkpoint.every", every, "log.eval_interval")
    if draft.get("log.wandb_log"):
        names = ("log.wandb_project", "log.wandb_log")
        draft.set("track.wandb.project", draft.get("log.wandb_project"), *names)
    else:
        draft.ignore_given(
            "without wandb_log nothing is sent", "log.wandb_log", "log.wandb_project"
        )


def precision(draft: TranslationDraft) -> None:
    """Mixed precision is fp16, with torch's GradScaler."""
    draft.set_compute("fp16" if draft.get("train.amp") else "fp32", "train.amp")


RULES = (optimizer, exchange, folder, precision)
