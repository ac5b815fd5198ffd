"""`cosformer reproduce probes`: the study of probes, its rates and then its seeds."""

import time
from dataclasses import dataclass, replace

from cosformer.check import check_choice
from cosformer.commands import study
from cosformer.commands.crew import CrewOptions
from cosformer.recipes import STUDIES, Scale, best_rates, protocols, trials

WORDS = {"only": [*STUDIES["probes"].entries], "columns": study.WORDS["probes"]}


@dataclass(frozen=True)
class Options(CrewOptions):
    """Measure what mechanisms remember: softmax, linear attention, the delta rule and cosFormer's
    family learn to recall pairs (mqar), to continue a pattern (induction) and to copy. These are
    the runs and the rows of `cosformer study probes`: every entry at all rates, then the six best
    of each probe, and softmax, with further seeds. Stopped at any moment, the same command goes on.

    cosformer reproduce probes --minutes 8

    cosformer reproduce probes --columns mqar-256 --only softmax delta-conv multiscale-conv

    cosformer reproduce probes --small
    """

    only: tuple[str, ...] = ()
    """Entries (lines of the table) by name; all of them if not given."""
    columns: tuple[str, ...] = ()
    """Probes by name: mqar-64, mqar-128, mqar-256, mqar-512, copying, induction; all of them if not
    given."""
    small: bool = False
    """Whether runs have a toy size, which tries the table out in minutes on two cores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.columns:
            check_choice("columns", name, protocols("probes", self.scale))
        _ = self.study  # which knows what is wrong

    @property
    def scale(self) -> Scale:
        return "tiny" if self.small else "full"

    @property
    def study(self) -> study.Options:
        """These options as those of a study, at its first stage."""
        of_crew = {name: getattr(self, name) for name in CrewOptions.__dataclass_fields__}
        return study.Options(
            "probes",
            only=self.only,
            probes=self.columns,
            scale=self.scale,
            **of_crew,
        )


def run(options: Options) -> int:
    """0, also where time is up; 1 if runs have failed."""
    begin, first = time.monotonic(), options.study
    code = study.run(first)
    done = first.book.results()
    scale, probes = first.scale, first.probes or tuple(protocols("probes", first.scale))
    planned = trials("probes", "rates", done, only=first.only, probes=probes, scale=scale)
    if not all(trial in done for trial in planned):
        return code
    best = [best_rates("probes", done, scale, probe) for probe in probes]
    only = tuple(name for name in first.only if all(name in each for each in best))
    if first.only and not only:  # all runs have diverged
        return code
    minutes = first.minutes
    if minutes is not None:
        minutes = max(minutes - (time.monotonic() - begin) / 60, 1e-6)
    return study.run(replace(first, stage="seeds", only=only, minutes=minutes))
