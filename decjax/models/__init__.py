"""Flax models as pure functions of plain pytrees of parameters; they contain nothing about workers or communication.

layers      layers that models share, and Flax modules as pure functions
decoder     a decoder-only language model, which can be divided into pipeline stages and tensor-parallel groups
lstm        a recurrent language model
images      the interface of image classifiers, and a multilayer perceptron
resnet      a residual network for small images
translator  an encoder–decoder transformer
beam        beam search for the best translation
"""

from decjax.models.decoder import Model, Parts, decoder_lm, sample
from decjax.models.images import ImageModel, mlp
from decjax.models.lstm import lstm
from decjax.models.resnet import resnet
from decjax.models.translator import Translator

__all__ = ["ImageModel", "Model", "Parts", "Translator", "decoder_lm", "lstm", "mlp", "resnet", "sample"]
