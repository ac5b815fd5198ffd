"""Models around any mechanism: encoders, a language model, an encoder-decoder."""

from cosformer.models.backbone import EMBEDDING_STD as EMBEDDING_STD
from cosformer.models.backbone import Backbone as Backbone
from cosformer.models.backbone import ModelState
from cosformer.models.backbone import TokenModel as TokenModel
from cosformer.models.config import PARAMETERS, PRESETS, Kind, ModelConfig
from cosformer.models.create import Model, create_model, parameter_count
from cosformer.models.decoder import LanguageModel
from cosformer.models.encoder import Classifier, MaskedLanguageModel, PairClassifier
from cosformer.models.encoder import class_head as class_head
from cosformer.models.encoder import pool as pool
from cosformer.models.generation import generate, generate_tokens
from cosformer.models.generator import Generator, Stream
from cosformer.models.pattern import read_pattern as read_pattern
from cosformer.models.recommended import RECOMMENDED, Use, recommended
from cosformer.models.sampling import Sampling
from cosformer.models.token_loss import TokenLoss as TokenLoss
from cosformer.models.translation import EncoderDecoder

__all__ = [  # what users call; the names that other rooms need are imported as themselves
    "PARAMETERS",
    "PRESETS",
    "RECOMMENDED",
    "Classifier",
    "EncoderDecoder",
    "Generator",
    "LanguageModel",
    "MaskedLanguageModel",
    "ModelConfig",
    "ModelState",
    "PairClassifier",
    "Sampling",
    "Stream",
    "create_model",
    "generate",
    "generate_tokens",
    "parameter_count",
    "recommended",
]
