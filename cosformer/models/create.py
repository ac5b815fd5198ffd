"""Make the model that a config describes."""

from torch import nn

from cosformer.models.config import ModelConfig
from cosformer.models.decoder import LanguageModel
from cosformer.models.encoder import Classifier, MaskedLanguageModel, PairClassifier
from cosformer.models.translation import EncoderDecoder

Model = LanguageModel | MaskedLanguageModel | Classifier | PairClassifier | EncoderDecoder

KINDS: dict[str, type[Model]] = {
    "decoder": LanguageModel,
    "masked-lm": MaskedLanguageModel,
    "classifier": Classifier,
    "pairs": PairClassifier,
    "encoder-decoder": EncoderDecoder,
}


def create_model(config: ModelConfig) -> Model:
    """The model that a config describes, its parameters drawn from torch's generator.

    >>> model = create_model(ModelConfig(kind="classifier", classes=10, mechanism="performer"))
    >>> model(torch.randint(256, (2, 50))).shape
    torch.Size([2, 10])
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {type(config).__name__}")
    return KINDS[config.kind](config)


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())
