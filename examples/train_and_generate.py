"""A language model of one's own text by the library's trainer, which then writes."""

import argparse
from pathlib import Path

from cosformer.models import Sampling, recommended
from cosformer.training import (
    Budget,
    Evaluation,
    Optimiser,
    Progress,
    RunConfig,
    TaskConfig,
    Writer,
    load,
    train,
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", help="a file or folder of texts, or `manual`, which Python has")
    parser.add_argument("--out", type=Path, default=Path("runs/example"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--preset", default="mini", help="size of the model")
    parser.add_argument("--prompt", default="The ")
    given = parser.parse_args(argv)
    config = RunConfig(
        TaskConfig("lm", {"text": given.text, "length": given.length}),
        given.out,
        preset=given.preset,
        model=recommended("lm"),  # a decay for each token, a norm and a gate, without positions
        optimiser=Optimiser(lr=3e-3),
        budget=Budget(steps=given.steps, batch=8),
        evaluation=Evaluation(every=100, batches=10),
    )
    # stopped at any moment, the same call goes on from the last checkpoint; so does one with more
    # steps after it has ended
    train(config, report=lambda event: isinstance(event, Progress) or print(event))

    run = load(given.out)  # the weights that were best on validation; the text is not needed
    sampling = Sampling(max_new_tokens=200, temperature=0.8, data_tokens=run.vocabulary.size)
    writer = Writer(run.model, run.vocabulary, sampling)
    print(given.prompt, end="")
    for piece in writer.stream(given.prompt):  # as it comes, every token at the same cost
        print(piece, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
