"""Translation between two languages: task "translation" and model "translator".

task      the task, whose metrics are the loss and BLEU
model     an encoder–decoder transformer
beam      beam search for the best translation
parallel  pairs of sentences in batches of a few lengths
"""

from decjax.contrib.translation.model import Translator
from decjax.contrib.translation.task import Translation

__all__ = ["Translation", "Translator"]
