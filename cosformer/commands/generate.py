"""`cosformer generate RUN`: text from a language model that was trained here."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cosformer.models import LanguageModel, Sampling
from cosformer.tasks import Vocabulary
from cosformer.training import Writer, encode, load

POSITIONAL = "run"
MOST_TOKENS = 300
"""New tokens where nobody says how many."""
ENDLESS = "the model that `cosformer train lm` makes by default has none"
"""What to do about a limit."""


@dataclass(frozen=True)
class Options:
    """Continue prompts. A single one is shown as it grows. With the recommended model every token
    costs the same, and a text may grow without a limit; softmax layers remember all of the text.

    cosformer generate runs/my-run --prompt 'Once upon' --tokens 200
    """

    run: Path
    """Folder of the run."""
    prompt: tuple[str, ...] = ()
    """One text or more to continue."""
    file: Path | None = None
    """A file with a prompt on every line that is not blank, instead; - is standard input."""
    tokens: int | None = None
    """The most new tokens of each; 300, or as many as the model's limit leaves, if not given."""
    temperature: float = 0.8
    """Lower is more likely and more repetitive; 0 takes the likeliest token."""
    top_k: int | None = None
    """Choose among so many of the likeliest tokens; all if not given."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together reach this probability; all if not given."""
    stop: tuple[str, ...] = ()
    """End before any of these texts; in bash, $'\\n' is a line's end."""
    seed: int = 0
    """The same seed gives the same text; prompt n draws from seed + n."""
    checkpoint: Literal["best", "last"] = "best"
    """The weights that were best on validation, or the last ones."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto: a GPU where there is one."""
    plugin: Path | None = None
    """Python file that registers the run's mechanism; the one of the run's config if not given."""

    def __post_init__(self) -> None:
        if (self.file is None) == (not self.prompt):
            given = "both" if self.prompt else "neither"
            raise ValueError(f"prompt or file must be given, got {given}")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        if "" in self.stop:
            raise ValueError("stop must be texts of one character or more, got an empty one")


def run(options: Options) -> int:
    prompts = read_prompts(options)
    loaded = load(options.run, options.checkpoint, device=options.device, plugin=options.plugin)
    if not isinstance(loaded.model, LanguageModel):
        raise ValueError(
            f"run must be of a language model, got {loaded.config.task.name}, "
            f"a {loaded.model.config.kind}"
        )
    writer = create_writer(options, loaded.model, loaded.vocabulary, prompts)
    if len(prompts) == 1:
        pieces = writer.stream(prompts[0], options.stop)
        begin = next(pieces, "")  # first: a prompt that cannot be continued is not shown
        for piece in itertools.chain([prompts[0] + begin], pieces):
            print(piece, end="", flush=True)
        print()
        return 0
    for n, text in enumerate(writer.together(prompts, options.stop), 1):
        print(f"--- {n} of {len(prompts)}\n{prompts[n - 1]}{text}")
    return 0


def read_prompts(options: Options) -> Sequence[str]:
    """The prompts that were given, or the lines of the file; blank lines are counted, not read."""
    if options.file is None:
        return options.prompt
    is_stream = str(options.file) == "-"
    try:
        text = sys.stdin.read() if is_stream else options.file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"file must be text in UTF-8, got {options.file}: {error}") from None
    lines = text.splitlines()
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"file must have a prompt on a line, got none in {options.file}")
    if blank := len(lines) - len(prompts):
        left_out = f"{blank} of {len(lines)} lines left out, from {options.file}"
        print(f"cosformer: generate: blank lines are no prompts: {left_out}", file=sys.stderr)
    return prompts


def create_writer(
    options: Options, model: LanguageModel, vocabulary: Vocabulary, prompts: Sequence[str]
) -> Writer:
    """Stops that are one token end a sequence at once; longer ones are found in the text."""
    tokens, limit, by = options.tokens, model.backbone.limit, model.backbone.limited_by
    longest = max(len(encode(vocabulary, prompt)) for prompt in prompts)
    if limit is not None and longest > limit:
        raise ValueError(
            f"prompt must be at most {limit} tokens, for the model's limit ({by}), got {longest}: "
            f"{ENDLESS}"
        )
    most = None if limit is None else limit + 1 - longest  # the last token is not read
    if tokens is None:
        tokens = MOST_TOKENS if most is None else min(MOST_TOKENS, most)
    elif most is not None and tokens > most:
        raise ValueError(
            f"tokens must be at most {most} after a prompt of {longest}, for the model's limit "
            f"of {limit} ({by}), got {tokens}: {ENDLESS}"
        )
    stops = [encode(vocabulary, stop) for stop in options.stop]
    sampling = Sampling(
        max_new_tokens=tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tuple(stop[0] for stop in stops if len(stop) == 1),
        data_tokens=vocabulary.size,
    )
    return Writer(model, vocabulary, sampling)
