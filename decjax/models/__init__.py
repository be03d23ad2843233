"""Flax models as pure functions of plain pytrees of parameters; they contain nothing about workers or communication.

layers       layers that models share, and Flax modules as pure functions
decoder      a decoder-only language model, which can be divided into pipeline stages and tensor-parallel groups
llama        a Llama-shaped language model
gpt2         GPT-2
huggingface  models in the files of Hugging Face
lstm         a recurrent language model
"""

from decjax.models.decoder import Model, Parts, decoder_lm, sample
from decjax.models.gpt2 import gpt2
from decjax.models.huggingface import pretrained
from decjax.models.llama import llama
from decjax.models.lstm import lstm

__all__ = ["Model", "Parts", "decoder_lm", "gpt2", "llama", "lstm", "pretrained", "sample"]
