"""`cosformer predict`: labels in the user's words, in the order of the input, without the data."""

import csv
import io
import itertools
import json
import lzma
import shutil

import pytest

from cosformer.commands.predict import Options, predicted
from cosformer.models import PairClassifier
from cosformer.training import (
    Budget,
    Evaluation,
    Optimiser,
    Predictor,
    RunConfig,
    TaskConfig,
    load,
    train,
)

WORDS = {"sweet": "jam honey sugar", "sour, sharp": "lemon vinegar"}
"""Label -> words of its texts. A label may have a comma."""
TEXTS = [
    (label, word) for _ in range(12) for label, words in WORDS.items() for word in words.split()
]


def trained(folder, rows, **options):
    """The run of a classifier that has learnt rows by heart, or nearly; its data are gone then."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig("classify", {"data": str(data), "length": 16, **options})
    small = {"model": {"layers": 1, "width": 32}, "evaluation": Evaluation(every=40)}
    given = {"optimiser": Optimiser(lr=1e-2), "budget": Budget(40, 16), "device": "cpu"}
    train(RunConfig(task, folder / "run", **small, **given))
    data.unlink()
    return folder / "run"


@pytest.fixture(scope="module")
def tastes(tmp_path_factory):
    rows = [{"taste": label, "dish": word} for label, word in TEXTS]
    return trained(tmp_path_factory.mktemp("t"), rows, text=["dish"], label="taste", tokens="bpe")


@pytest.fixture(scope="module", params=[1, 2], ids=["joined", "towers"])
def pairs(tmp_path_factory, request):
    rows = [
        {"label": f"{a[:3]}{b[:3]}", "sentence1": a, "sentence2": b}
        for a in ("lemon", "honey")
        for b in ("vinegar", "sugar")
    ]
    return trained(tmp_path_factory.mktemp("p"), rows * 6, towers=request.param)


def table(path, header, rows):
    with io.StringIO(newline="") as file:
        csv.writer(file).writerows([header, *rows])
        path.write_text(file.getvalue())
    return path


def test_labels_come_in_the_users_words_and_in_the_order_of_the_input(tastes, tmp_path, shell):
    rows = table(tmp_path / "rows.csv", ("n", "dish"), [(n, w) for n, (_, w) in enumerate(TEXTS)])
    shown = shell.shows("predict", tastes, "--data", rows, "--batch", 7)
    found = [json.loads(line) for line in shown.splitlines()]
    assert [each["label"] for each in found] == [label for label, _ in TEXTS]
    for each in found:
        assert list(each["probabilities"]) == ["sour, sharp", "sweet"]
        assert sum(each["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert each["probabilities"][each["label"]] > 0.5


def test_csv_says_what_jsonl_says_and_a_file_what_the_screen_says(tastes, tmp_path, shell):
    rows = table(tmp_path / "rows.csv", ("dish",), [[word] for _, word in TEXTS[:5]])
    lines = [json.loads(x) for x in shell.shows("predict", tastes, "--data", rows).splitlines()]
    text = shell.shows("predict", tastes, "--data", rows, "--format", "csv")
    header, *cells = csv.reader(io.StringIO(text))
    assert header == ["label", "probability_sour, sharp", "probability_sweet"]
    assert [[c[0], *map(float, c[1:])] for c in cells] == [
        [line["label"], *line["probabilities"].values()] for line in lines
    ]
    out = tmp_path / "found.csv"
    command = ("predict", tastes, "--data", rows, "--format", "csv", "--out", out)
    assert shell.shows(*command) == f"written: {out}\n"
    assert out.read_text() == text


def test_lines_of_standard_input_are_texts_and_a_blank_one_is_an_empty_text(
    tastes, monkeypatch, shell
):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"honey\n\n{'lemon ' * 30}\n"))
    code, out, err = shell("predict", tastes)
    assert (code, len(out.splitlines())) == (0, 3)
    assert "1 of 3 texts are empty and are read as one start token" in err
    assert "1 of 3 sequences are longer than length=16 and are cut" in err


def test_pairs_are_two_columns_or_two_texts_with_a_tab(pairs, tmp_path, monkeypatch, shell):
    rows = [("sugar", "lemon"), ("vinegar", "honey")]
    path = table(tmp_path / "rows.csv", ("sentence2", "sentence1"), rows)
    from_file = shell.shows("predict", pairs, "--data", path)
    labels = [json.loads(line)["label"] for line in from_file.splitlines()]
    assert labels == ["lemsug", "honvin"]
    monkeypatch.setattr("sys.stdin", io.StringIO("lemon\tsugar\nhoney\tvinegar"))
    assert shell.shows("predict", pairs) == from_file
    monkeypatch.setattr("sys.stdin", io.StringIO("lemon sugar\n"))
    assert "line 1 must be two texts with one tab between them" in shell.refuses("predict", pairs)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"lemon\tsugar\xff\n"), "utf-8"))
    assert "standard input must be text in UTF-8: 'utf-8' codec" in shell.refuses("predict", pairs)
    named = ("--data", path, "--text", "sentence1")
    assert "text must name as many columns as the run was trained on, 2, got 1" in shell.refuses(
        "predict", pairs, *named
    )


def test_what_is_predicted_is_what_was_judged(tastes, tmp_path):
    """The batch of a prediction is that of the task on the same texts."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"taste": label, "dish": word}) + "\n" for label, word in TEXTS)
    )
    run = load(tastes, device="cpu")
    predictor = Predictor.of(run)
    options = {**run.config.task.options, "data": str(tmp_path / "rows.jsonl")}
    task = TaskConfig("classify", options).create("cpu", run.vocabulary)
    batch = task.batch("valid", seed=0, rank=0, step=0, batch_size=4)
    found = predictor.model(batch["tokens"], batch["mask"]).softmax(-1).tolist()
    texts = [
        run.vocabulary.decode(t[m]) for t, m in zip(batch["tokens"], batch["mask"], strict=True)
    ]
    assert predictor.probabilities([texts]).tolist() == found


NO_COLUMNS = [
    ("honey", TypeError, r"columns, as \[\['a text', 'another'\]\], got a string$"),
    (["honey", "lemon"], TypeError, "got a string as a column"),
    ([[3]], TypeError, "columns of strings, got int"),
    ([], ValueError, "as many columns as the run, 1, got 0"),
    ([["honey"], ["lemon"]], ValueError, "as many columns as the run, 1, got 2"),
    ([[]], ValueError, r"columns of one length from 1 on, got \[0\]"),
]


@pytest.mark.parametrize(("texts", "error", "message"), NO_COLUMNS)
def test_what_are_no_columns_of_texts_is_refused(tastes, texts, error, message):
    """Two texts in a list were once read as pairs of their letters."""
    predictor = Predictor.of(load(tastes, device="cpu"))
    with pytest.raises(error, match=message):
        predictor.probabilities(texts)


def test_input_without_an_end_is_answered_batch_by_batch(tastes, monkeypatch):
    taken = itertools.count()
    monkeypatch.setattr("sys.stdin", (f"honey {next(taken)}\n" for _ in itertools.repeat(None)))
    lines = predicted(Options(tastes, batch=3), Predictor.of(load(tastes, device="cpu")))
    assert len(list(itertools.islice(lines, 7))) == 7
    assert next(taken) == 9


def test_a_run_without_labels_gives_numbers_and_says_so(tastes, tmp_path, monkeypatch, shell):
    older = shutil.copytree(tastes, tmp_path / "older")
    (older / "labels.json").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("honey\nlemon\n"))
    code, out, err = shell("predict", older)
    assert (code, [json.loads(line)["label"] for line in out.splitlines()]) == (0, [1, 0])
    assert f"{older} does not say what its labels are called: they are numbers from 0 on" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format": 2}, "must have format 1, got 2"),
        ({"format": 1, "labels": "no"}, "must be a list of texts, got 'no'"),
        (
            {"format": 1, "labels": ["a"], "columns": []},
            "must be the 2 classes of its model, got 1",
        ),
    ],
)
def test_labels_that_are_not_those_of_the_run_are_refused(
    tastes, tmp_path, content, message, monkeypatch, shell
):
    run = shutil.copytree(tastes, tmp_path / "run")
    (run / "labels.json").write_text(json.dumps(content))
    monkeypatch.setattr("sys.stdin", io.StringIO("honey\n"))
    assert message in shell.refuses("predict", run)


def test_a_packed_file_is_read_as_it_is_unpacked(tastes, tmp_path, shell):
    path = tmp_path / "rows.tsv.xz"
    path.write_bytes(lzma.compress(b"dish\nhoney\n"))
    assert '"label": "sweet"' in shell.shows("predict", tastes, "--data", path)
    path.write_bytes(path.read_bytes()[:-9])
    assert "must be a whole .xz file" in shell("predict", tastes, "--data", path)[2]


def test_a_row_that_is_wrong_leaves_no_file(tastes, tmp_path, shell):
    (tmp_path / "rows.tsv").write_text("dish\tn\nhoney\t1\nlemon\n")
    command = ("predict", tastes, "--data", tmp_path / "rows.tsv", "--batch", 1)
    refused = shell.refuses(*command, "--out", tmp_path / "found")
    assert "row 3, must have 2 fields as the header has, got 1" in refused
    assert [path.name for path in tmp_path.iterdir()] == ["rows.tsv"]


BAD = [
    (("--data", "nowhere.csv"), "data must be a .tsv, .csv or .jsonl file, got nowhere.csv"),
    (("--data", "a.csv", "--text", "b"), "must have the column 'b', got 'a': --text COLUMN names"),
    (("--data", "a.csv"), "must have the column 'dish', got 'a': --text COLUMN names another one"),
    (("--data", "a.csv", "--text", "a", "b", "c"), "text must name one column or two, got a b c"),
    (("--text", "a"), "text must be left out for standard input, got a"),
    (("--batch", "0"), "batch must be a whole number from 1 on, got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_what_cannot_be_predicted_is_one_line(tastes, here, arguments, message, shell):
    (here / "a.csv").write_text("a\nhoney\n")
    assert message in shell.refuses("predict", tastes, *arguments)


def test_a_model_that_is_no_classifier_is_refused(run, shell):
    assert "run must be of a classifier, got lm, a decoder" in shell.refuses("predict", run)


def test_text_is_generated_without_the_data(run, here, shell):
    config = json.loads((run / "config.json").read_text())
    config["task"]["options"]["text"] = str(here / "gone.txt")
    (run / "config.json").write_text(json.dumps(config))
    shell.shows("generate", run, "--prompt", "To be", "--tokens", "5", "--device", "cpu")


def exported(run, to, shell):
    """The same run behind Transformers' pipeline, with its own words for labels."""
    transformers = pytest.importorskip("transformers")
    shell.shows("export", run, "--to", "hf", to)
    return transformers.pipeline("text-classification", str(to), top_k=None, truncation=True)


def as_predicted(given):
    return {each["label"]: pytest.approx(each["score"], abs=1e-5) for each in given}


def test_an_exported_classifier_has_labels_and_probabilities_of_predict(tastes, tmp_path, shell):
    texts = ["lemon", "honey, sugar " * 20]
    found = exported(tastes, tmp_path / "model", shell)(texts, batch_size=2)
    predictor = Predictor.of(load(tastes, device="cpu"))
    for row, given in zip(predictor.probabilities([texts]).tolist(), found, strict=True):
        assert dict(zip(predictor.labels, row, strict=True)) == as_predicted(given)


def test_an_exported_classifier_of_joined_pairs_reads_two_texts(pairs, tmp_path, shell):
    if isinstance(load(pairs, device="cpu").model, PairClassifier):
        refusal = shell.refuses("export", pairs, "--to", "hf", tmp_path / "model")
        assert "kind must be decoder, masked-lm or classifier" in refusal
        return
    given = exported(pairs, tmp_path / "model", shell)({"text": "honey", "text_pair": "sugar"})
    predictor = Predictor.of(load(pairs, device="cpu"))
    [row] = predictor.probabilities([["honey"], ["sugar"]]).tolist()
    assert dict(zip(predictor.labels, row, strict=True)) == as_predicted(given)
