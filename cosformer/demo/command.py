"""`cosformer demo`: check the op, train cosFormer beside softmax, show both, leave a page."""

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cosformer import __version__, records
from cosformer.bench import busy
from cosformer.check import check_new_folder, check_positive, check_seed
from cosformer.config import differences, plain
from cosformer.demo import looking, op
from cosformer.demo.jobs import JOBS
from cosformer.demo.learning import COMPARED, Pair, learn, plan
from cosformer.demo.screen import Screen
from cosformer.mechanisms import MECHANISMS
from cosformer.models import RECOMMENDED
from cosformer.records import Row
from cosformer.report import (
    NAMES,
    TITLES,
    crossover_sentence,
    demo_page,
    floor_sentence,
    summary,
    times,
    verdict,
    write_whole,
)
from cosformer.training import CONFIG, MOST_SEEDS, RunConfig, comparable, read_json, state_of

GRACE = 1.1
"""A machine that has become slower since the plan was made gets this much of the time."""

BY_DEMO = ("budget.steps", "evaluation.every", "log_every", "seed", "start")
"""Settings in which one demo may differ from another: its plan, its seed, its beginning."""


@dataclass(frozen=True)
class Options:
    """The library at work on what every machine has, within minutes on a CPU."""

    seconds: float = 180.0
    """Time for learning: a slow machine makes fewer steps, and takes no longer."""
    lengths: tuple[int, ...] = (512, 2048, 8192)
    """Sequence lengths at which the op is timed."""
    out: Path = Path("out/demo")
    """Folder for the page (demo.html), the rows (demo.jsonl) and the runs."""
    seed: int = 0
    """Seed of inputs, weights and text."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be one or more positive numbers, got {self.lengths}")
        check_positive("seconds", self.seconds)
        check_seed(self.seed, MOST_SEEDS)


def run(options: Options) -> int:
    """All sections in order; 1 if a check fails."""
    import matplotlib  # noqa: F401  # if it is missing, say so before the work
    import safetensors  # noqa: F401

    began, file = time.monotonic(), options.out / "demo.jsonl"
    check_new_folder("out", options.out)
    records.require_rows(file, "out")
    if warning := busy():
        print(warning, file=sys.stderr)
    most = torch.get_num_threads()
    torch.set_num_threads(op.fastest_threads(options.seed, most))
    print(f"cosformer {__version__}, torch {torch.__version__}, {_threads()}\n")
    this = records.Run.begin(seed=options.seed)
    rows = show_checks(this)
    if not rows:
        print("the checks failed: nothing is timed", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)  # no work whose result could not be written
    rows += show_race(this, options)
    pairs: dict[str, Pair] = {}
    pair = None
    for name, job in JOBS.items():
        seconds = job.share * options.seconds
        configs = {
            each: job.make(options.out / f"{name}-{each}", options.seed, each) for each in COMPARED
        }
        torch.set_num_threads(op.fastest_threads(options.seed, most))  # others come and go
        this = replace(this, hardware={**this.hardware, "threads": torch.get_num_threads()})
        print(f"\n{TITLES[name]}: the text is made ready, {_threads()} …", flush=True)
        pair = plan(this, name, configs, seconds, job.judged, before=pair)
        rows += show_learning(this, pair, seconds)
        pairs[name] = pair
    formulas = {name: MECHANISMS[name].formula for name in COMPARED}
    rows += show_models(this, pairs["short"], formulas)
    records.append(file, rows)
    write_whole(options.out / "demo.html", demo_page(rows, formulas).encode())
    print(f"\n{textwrap.fill(verdict(rows), 100)}")
    print(f"\nIn {time.monotonic() - began:.0f} s. Page: {options.out / 'demo.html'}")
    ours = pairs["short"].configs[RECOMMENDED].out
    print(f"Go on: cosformer generate {ours} --prompt 'This function'")
    return 0


def show_checks(this: records.Run) -> list[Row]:
    """The largest error; no rows at all if one is too large."""
    found = op.checks(this.seed or 0)
    for check in found:
        if not check.passed:
            print(f"check failed: {check}", file=sys.stderr)
    if not all(check.passed for check in found):
        return []
    worst = max(check.error for check in found)
    print("Exact: outputs, gradients and a stream of single tokens, in float32, are within")
    print(f"{worst:.1e} of the quadratic formula in float64 ({len(found)} comparisons).\n")
    return [this.row("error", check.error, "x largest", quantity=check.name) for check in found]


def show_race(this: records.Run, options: Options) -> list[Row]:
    """Times of the op beside those of softmax."""
    rows = list(op.race(this, options.lengths))
    found = times(rows, "forward")
    print(f"Milliseconds of one causal forward pass, {op.SIZES.heads} heads of {op.SIZES.width}:")
    print(op.text_table(found))
    print(f"{crossover_sentence(found)}.")
    return rows


def show_learning(this: records.Run, pair: Pair, seconds: float) -> list[Row]:
    """Train with either mechanism in turns, telling how far they are."""
    for config in pair.configs.values():
        begin_anew(config)
    rows, facts = list(pair.rows), pair.task.facts
    batch = config.budget.batch
    print(f"{pair.steps:,} steps of {batch} × {facts.length:,} tokens each, in turns:")
    with contextlib.closing(Screen(pair)) as screen:
        for row in learn(this, pair, deadline=time.monotonic() + GRACE * seconds):
            rows.append(row)
            screen.show(row)
    if screen.done < pair.steps:
        print(f"  The time is up after {screen.done:,} steps.")
    for title, *cells in summary(rows, pair.name):
        print(f"  {title:<28}" + "".join(f"{cell:>18}" for cell in cells))
    print(f"  {floor_sentence(rows, pair.name)}")
    return rows


def show_models(this: records.Run, pair: Pair, formulas: Mapping[str, str]) -> list[Row]:
    """Formula, text and maps of both models; rows say how far each head looks back."""
    rows: list[Row] = []
    for name, weights, found in looking.looked(this, pair):
        print(f"\n{NAMES[name]}: {formulas[name]}")
        print(f"What the {NAMES[name]} model writes:")
        for row in found:
            if row.what == "written":
                # line ends are on the page
                line = " ".join(f"{row.config['prompt']}{row.config['written']}".split())
                print(textwrap.fill(line, 100, initial_indent="  | ", subsequent_indent="    "))
        print("Where its heads look (down: tokens, across: the tokens that they see):")
        print(textwrap.indent(looking.shaded(weights), "  "))
        reach = [head["reach"] for row in found for head in row.config.get("heads", ())]
        far = ", ".join(f"{each:.1f}" for each in reach)
        print(f"  Tokens that each head looks back in the mean: {far}")
        rows += found
    if not rows:
        print("\nThe time was too short for a checkpoint: there are no text and no maps.")
    return rows


def begin_anew(config: RunConfig) -> None:
    """Remove what an earlier demo left; another run, or one that is at work, is not touched."""
    folder = config.out
    if not (folder / CONFIG).is_file():
        return
    if state_of(folder)["state"] == "running":
        raise ValueError(f"out must not be in use by another demo, got {folder}")
    found, wanted = comparable(read_json(folder / CONFIG)), comparable(plain(config))
    if other := [name for name in differences(found, wanted) if name not in BY_DEMO]:
        raise ValueError(
            f"out must have no runs but those of this demo, got {folder} with another {other[0]}: "
            "remove it, or name another folder"
        )
    shutil.rmtree(folder)


def _threads() -> str:
    count = torch.get_num_threads()
    return "CPU, 1 thread" if count == 1 else f"CPU, {count} threads"
