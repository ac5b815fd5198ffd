"""`cosformer study`: many mechanisms under one protocol, several runs side by side."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cosformer.check import check_positive, check_whole
from cosformer.commands import crew
from cosformer.commands.crew import Book, CrewOptions
from cosformer.commands.crew_share import Share, shared
from cosformer.commands.study_run import work
from cosformer.data import require_files
from cosformer.recipes import PROBES, STUDIES, Scale, Stage, Trial, check_names, trials
from cosformer.tasks import TEXTS
from cosformer.training import shown

POSITIONAL = "task"
WORDS = {
    "only": [*dict.fromkeys(name for study in STUDIES.values() for name in study.entries)],
    "probes": [*PROBES["full"]],
}


@dataclass(frozen=True)
class Options(CrewOptions):
    """Compare mechanisms on the bytes of enwik8 or on generated probes, all under one protocol.
    Every run that ends is one row. Stopped at any moment, the same command goes on; what is
    finished is not run again.

    cosformer study lm

    cosformer study lm --stage seeds --finalists 6

    cosformer study mlm --only softmax gated-conv-norm-sigmoid --jobs 4 --minutes 9

    cosformer study probes --probes mqar-256 induction
    """

    task: Literal["lm", "mlm", "probes"]
    """What is learnt: the next byte (lm), masked bytes (mlm), or small tasks that linear attention
    finds hard (probes)."""
    stage: Stage = "rates"
    """rates: every entry at all rates; seeds: finalists at their best rate with three seeds; long:
    finalists at their best rate for more steps; speed: finalists timed, one after another."""
    only: tuple[str, ...] = ()
    """Entries by name; all of them in the stage rates, the finalists in others, if not given."""
    probes: tuple[str, ...] = ()
    """Probes by name: mqar-64, mqar-128, mqar-256, mqar-512, copying, induction; all of them if not
    given. For the study of probes alone."""
    rates: tuple[float, ...] = ()
    """Highest learning rates. If not given, all of the protocol in the stage rates, and in others
    the best one of an entry that is done at all of them."""
    finalists: int = 6
    """Number of finalists, the best on validation, for each probe; softmax is one more if it is not
    among them."""
    data: str | None = None
    """Folder with enwik8.xz, or another text file; the data folder if not given. Probes have no
    data."""
    scale: Scale = "full"
    """Size of models and runs. 4k, 16k: sequences of 4,096 or 16,384 tokens; deep: 12 layers of 256
    and 4,096 tokens, for patterns with one exact layer in twelve; base: 12 layers of 768; tiny: a
    toy size, on a text of yours (--data) or on probes, to try the command out in seconds. Probes
    have the scales full and tiny."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.task, only=self.only, probes=self.probes, scale=self.scale)
        check_whole("finalists", self.finalists, 1)
        for rate in self.rates:
            check_positive("rates", rate)
        if self.data is not None and self.task == "probes":
            raise ValueError(f"data must not be given for probes, which are drawn, got {self.data}")
        if self.data is not None and not Path(self.data).exists():
            raise ValueError(f"data must be a folder or a text file, got {self.data}")

    @property
    def toy(self) -> str:
        return self.scale if self.scale == "tiny" else ""

    @property
    def book(self) -> Book[Trial]:
        return self.book_of(f"study-{self.task}", Trial, self.data)


def run(options: Options) -> int:
    """0, also where time is up; 1 if runs have failed. Of many processes the first tells."""
    share = shared()
    with shown(is_first=share.is_first):
        return _run(options, share)


def _run(options: Options, share: Share) -> int:
    book = options.book
    book.require()
    if share.is_first:
        book.collect()
    done = book.results()
    planned = trials(
        options.task,
        options.stage,
        done,
        only=options.only,
        probes=options.probes,
        rates=options.rates,
        finalists=options.finalists,
        scale=options.scale,
    )
    todo = [trial for trial in planned if trial not in done]
    if todo:
        _require_text(todo[0], options.data)
    print(
        f"{options.task}, {options.stage}: {len(planned)} runs, {len(planned) - len(todo)} done; "
        f"runs in {book.folder}, rows in {book.path}",
        flush=True,
    )
    team = Crew(options, todo, share)
    team.work()
    failed = share.failures(team.failed)
    team.collect()
    done = book.results()
    ended = sum(trial in done for trial in planned)
    ranked = {t: v for t in planned if (v := done.get(t)) is not None}
    sign = STUDIES[options.task].sign
    best = sorted(ranked, key=lambda trial: sign * ranked[trial])
    for trial in best[:10]:
        print(f"  {trial.spell(ranked[trial])}  {trial.name}")
    more = "" if ended == len(planned) else "; the same command goes on"
    print(f"{ended} of {len(planned)} runs are done, {len(failed)} have failed{more}")
    if not share.is_first:
        return 0
    for name, reason in failed.items():
        print(f"cosformer: study: {name} failed: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _require_text(trial: Trial, data: str | None) -> None:
    """Raise unless the text of all runs is there, and a user's own can be learnt from."""
    task = trial.protocol.task(trial.study, data)
    text = task.options.get("text")
    if text in TEXTS:
        require_files(text, task.options.get("data"))
    elif text is not None:
        task.create("cpu")


class Crew(crew.Crew[Trial]):
    """Processes that work on trials of a study."""

    def __init__(self, options: Options, todo: Sequence[Trial], share: Share | None = None) -> None:
        if options.stage == "speed":  # a run beside another would not tell its own speed
            options = replace(options, jobs=1)
        super().__init__(
            options, todo, book=options.book, data=options.data, target=work, share=share
        )
