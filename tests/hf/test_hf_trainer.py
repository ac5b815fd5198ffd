"""`transformers.Trainer` trains native models, and models whose attention is ours."""

import hf_cases as cases
import pytest
import torch

pytest.importorskip("accelerate")
from transformers import Trainer, TrainingArguments

import cosformer.hf as hf

SAMPLES = [{"input_ids": torch.arange(20) % 7, "labels": torch.arange(20) % 7} for _ in range(8)]


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_a_batch_in_pieces_is_one_batch_however_many_labels_each_piece_has(tmp_path):
    samples = [dict(each) for each in SAMPLES[:4]]
    for n, each in enumerate(samples):
        each["labels"] = torch.where(torch.arange(20) < 4 * n + 2, each["labels"], -100)
    found = []
    for pieces in (1, 4):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=4 // pieces, optim="sgd",
            gradient_accumulation_steps=pieces, learning_rate=1.0, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", logging_strategy="no", max_grad_norm=0.0,
        )  # fmt: skip
        model = cases.native()
        Trainer(model, arguments, train_dataset=samples).train()
        found.append(model.lm_head.weight.detach())
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found[0], cases.native().lm_head.weight, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.parametrize("make", [cases.native, lambda: cases.gpt2("cosformer-multiscale")])
def test_a_few_steps_learn_and_the_checkpoint_is_what_was_learnt(make, tmp_path):
    arguments = TrainingArguments(
        str(tmp_path), max_steps=10, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, report_to=[], use_cpu=True, gradient_checkpointing=True,
        disable_tqdm=True, save_steps=10, logging_strategy="no",
    )  # fmt: skip
    model = make()
    trainer = Trainer(model, arguments, train_dataset=SAMPLES, eval_dataset=SAMPLES)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before - 0.5
    if isinstance(model, hf.CosformerForCausalLM):
        saved = hf.CosformerForCausalLM.from_pretrained(tmp_path / "checkpoint-10")
        tokens = SAMPLES[0]["input_ids"][None]
        assert torch.equal(saved(tokens).logits, model.eval()(tokens).logits)


def test_smoothed_labels_are_those_of_the_next_tokens(tmp_path):
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True
    )
    model, x = cases.native(), cases.tokens()
    found = Trainer(model, arguments).compute_loss(model, {"input_ids": x, "labels": x})
    logs = model(x).logits[:, :-1].log_softmax(-1)
    right = 0.9 * logs.gather(2, x[:, 1:, None]).mean() + 0.1 * logs.mean()
    torch.testing.assert_close(found, -right)
