"""`cosformer generate`: text that streams, several prompts, stops, and what it refuses."""

import io
from dataclasses import replace

import pytest
import torch

from cosformer.models import PRESETS, LanguageModel, Sampling
from cosformer.models.sampling import Choices, Plan, choose
from cosformer.tasks import vocabulary as vocabularies
from cosformer.training.writer import Writer, encode

SHORT = ("--tokens", "12", "--device", "cpu")


def test_a_prompt_is_continued_the_same_for_the_same_seed(trained, shell):
    command = ("generate", trained, "--prompt", "To be", *SHORT, "--seed")
    first, again, other = (shell.shows(*command, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert (first[:5], len(first) > len("To be\n")) == ("To be", True)


def test_a_text_goes_as_far_as_the_model_reaches(trained, shell):
    text = shell.shows("generate", trained, "--prompt", "To be", "--device", "cpu")
    assert 5 < len(text) <= len("To be") + 60 + len("\n")  # its sequences have 64 tokens


def test_several_prompts_from_a_file_get_what_each_gets_alone(trained, tmp_path, shell):
    file, greedy = tmp_path / "prompts", (*SHORT, "--temperature", "0")
    file.write_text("To\n\nor not\n  \n")
    code, together, err = shell("generate", trained, "--file", file, *greedy)
    assert code == 0
    assert err.endswith(f"blank lines are no prompts: 2 of 4 lines left out, from {file}\n")
    for n, prompt in enumerate(("To", "or not"), 1):
        alone = shell.shows("generate", trained, "--prompt", prompt, *greedy)
        assert f"--- {n} of 2\n{alone}" in together


def test_a_prompt_comes_from_standard_input(trained, monkeypatch, shell):
    monkeypatch.setattr("sys.stdin", io.StringIO("To be"))
    code, out, err = shell("generate", trained, "--file", "-", *SHORT)
    assert (code, out[:5], err) == (0, "To be", "")


def scripted(text):
    """A writer whose model writes this, byte by byte, whatever it has read."""
    model = LanguageModel(replace(PRESETS["tiny"], max_length=len(text) + 8)).eval()
    script = iter(torch.nn.functional.one_hot(torch.tensor([*text])[:, None], 256).float())
    model.head.forward = lambda x: next(script)  # a head that was exchanged is called
    sampling = Sampling(max_new_tokens=len(text), temperature=0)
    return Writer(model, vocabularies.Bytes(), sampling)


STREAMS = [
    (b"abc", (), ["a", "b", "c"]),
    ("aé€".encode(), (), ["a", "é", "€"]),  # nothing of a character before all of it
    (b"a\xff", (), ["a", "\ufffd"]),  # what is no text ends, too
    (b"a\xe2\x82", (), ["a", "\ufffd"]),  # and so does a character that was begun
    (b"one\n\ntwo", ("\n\n",), ["o", "n", "e"]),
    (b"a-b--c", ("--",), ["a", "-b"]),  # what may begin a stop waits
    (b"abcdef", ("e", "xyz", "cd"), ["a", "b"]),  # the first stop counts
]


@pytest.mark.parametrize(("text", "stop", "pieces"), STREAMS)
def test_a_stream_shows_what_can_no_longer_change(text, stop, pieces):
    assert [piece for piece in scripted(text).stream("p", stop) if piece] == pieces
    assert scripted(text).together(["p"], stop) == ["".join(pieces)]


def test_words_of_a_prompt_do_not_end_its_line_and_a_blank_stands_before_what_follows():
    words = vocabularies.Words.learn(b"to be or\nnot to be\n")
    assert [words.names[n] for n in encode(words, "to be")] == ["to", "be"]
    assert [words.names[n] for n in encode(words, "to be\n")] == ["to", "be", "<eos>"]
    model = LanguageModel(replace(PRESETS["tiny"], vocabulary=words.size)).eval()
    writer = Writer(model, words, Sampling(max_new_tokens=1, temperature=0))
    (text,) = writer.together(["to be"])
    assert text.startswith(" ")
    assert "".join(writer.stream("to be")) == text


@pytest.mark.parametrize("way", [{}, {"top_k": 4}, {"top_p": 0.999}, {"temperature": 0}])
def test_tokens_that_are_no_data_are_never_chosen(way):
    logits, noise = torch.tensor([[1.0, 0.0, 1.5, 50.0]]), torch.tensor([0.99])
    for data_tokens, right in ((None, (3,)), (3, (0, 1, 2))):
        sampling, choices = Sampling(data_tokens=data_tokens, **way), Choices.empty(1)
        choices.set(0, sampling)
        assert choose(logits, choices, Plan.of([sampling]), noise).item() in right


def test_a_vocabulary_that_is_missing_is_named(run, shell):
    (run / "vocabulary.json").unlink()
    message = f"run must have its file vocabulary.json or tokenizer.json, got {run} without"
    assert message in shell.refuses("generate", run, "--prompt", "a")


BAD = [
    ((), "prompt or file must be given, got neither"),
    (("--prompt", "a", "--file", "-"), "prompt or file must be given, got both"),
    (("--prompt", ""), "prompt must be at least one token, got ''"),
    (("--prompt", "a", "--stop", ""), "stop must be texts of one character or more"),
    (("--prompt", "a", "--temperature", "-1"), "temperature must be finite and at least 0, got -1"),
    (
        ("--prompt", "a", "--tokens", "900"),
        "most 64 after a prompt of 1, for the model's limit of 64 (learned positions and",
    ),
    (("--prompt", "a", "--tokens", "0"), "generate: tokens must be at least 1, got 0"),
    (
        ("--prompt", "a" * 65),
        "(learned positions and cosformer), got 65: the model that `cosformer train lm` makes by",
    ),
    (("--file", "latin.txt"), "file must be text in UTF-8, got latin.txt: 'utf-8' codec can't"),
    (("--prompt", "a", "--seed", str(2**63)), f"seed must be below {2**63}, got 92233"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_what_cannot_be_done_is_one_line(trained, here, arguments, message, shell):
    (here / "latin.txt").write_bytes(b"caf\xe9\n")
    assert message in shell.refuses("generate", trained, *arguments)
