"""lm-evaluation-harness scores a run that was exported, offline, on a task of the user's."""

import json
import math
import random

import pytest
import torch

pytest.importorskip("lm_eval")

from cosformer.cli import main
from cosformer.models import Sampling
from cosformer.training import Writer, encode, load

SAYS = {"cat": "meow", "dog": "woof", "cow": "moo"}
STORY = "".join(
    f"a {name} says {SAYS[name]}. " for name in random.Random(0).choices([*SAYS], k=300)
)
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {at}/rows.jsonl}}, cache_dir: {at}/cache}}
test_split: test
output_type: {kind}
doc_to_text: {asked}
doc_to_target: {answer}
{more}
"""
CHOICE = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'
UNTIL = 'generation_kwargs: {until: ["."], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]'
KINDS = {
    "choose": ("multiple_choice", '"a {{name}} says"', "answer", CHOICE),
    "write": ("generate_until", '"a {{name}} says"', '"{{choices[answer]}}"', UNTIL),
    "read": ("loglikelihood_rolling", '""', '"{{text}}"', "metric_list: [{metric: bits_per_byte}]"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, its export, and tasks on the names of animals."""
    at = tmp_path_factory.mktemp("harness")
    (at / "my.txt").write_text(STORY)
    small = {"task.options.tokens": "bpe", "task.options.length": 32}
    given = [word for name, x in small.items() for word in ("--set", f"{name}={x}")]
    run = ["train", "lm", "--data", str(at / "my.txt"), "--out", str(at / "run"), "--steps", "30"]
    assert main([*run, *given]) == 0
    export = ["export", str(at / "run"), "--to", "hf", str(at / "hf")]
    assert main(export) == 0
    choices = list(SAYS.values())
    rows = [
        {"name": name, "choices": choices, "answer": n, "text": f"a {name} says {choices[n]}."}
        for n, name in enumerate(SAYS)
    ]
    (at / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, (kind, asked, answer, more) in KINDS.items():
        given = {"kind": kind, "asked": asked, "answer": answer, "more": more}
        task = TASK.format(name=name, at=at, **given)
        (at / f"{name}.yaml").write_text(task)
    return at


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of many packages that it brings along
def test_an_exported_run_is_scored_by_its_own_numbers(folder, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("socket.socket.connect", no_network)
    model = HFLM(pretrained=str(folder / "hf"), backend="causal", device="cpu", batch_size=2)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, tasks=list(KINDS), task_manager=tasks, bootstrap_iters=0)
    run = load(folder / "run", device="cpu")
    samples, results = found["samples"], found["results"]
    right = 0
    for each in samples["choose"]:
        begun = encode(run.vocabulary, f"a {each['doc']['name']} says")
        own = [
            log_probability(run.model, begun, encode(run.vocabulary, f" {choice}"))
            for choice in each["doc"]["choices"]
        ]
        assert [score for [(score, _)] in each["resps"]] == pytest.approx(own, abs=1e-3)
        right += own.index(max(own)) == each["doc"]["answer"]
    assert results["choose"]["acc,none"] == pytest.approx(right / 3)
    sampling = Sampling(max_new_tokens=8, temperature=0, data_tokens=run.vocabulary.size)
    writer = Writer(run.model, run.vocabulary, sampling)
    for each in samples["write"]:
        assert each["resps"][0] == writer.together([f"a {each['doc']['name']} says"], ["."])
    start = run.vocabulary.size + 3  # the harness puts it before a text
    texts = [each["doc"]["text"] for each in samples["read"]]
    total = sum(log_probability(run.model, [start], encode(run.vocabulary, x)) for x in texts)
    bits = -total / math.log(2) / len("".join(texts))
    assert results["read"]["bits_per_byte,none"] == pytest.approx(bits, abs=1e-3)


def log_probability(model, begun, more):
    """Of tokens after others, by the model itself."""
    tokens = torch.tensor([[*begun, *more]])
    with torch.no_grad():
        logs = model(tokens)[0, len(begun) - 1 : -1].log_softmax(-1)
    return logs.gather(-1, torch.tensor(more)[:, None]).sum().item()


def no_network(*_):
    raise OSError("a test must not reach for the network")
