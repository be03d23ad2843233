"""Classification of small images, such as digits and CIFAR-10: task "images", models "resnet" and "mlp".

task    the task, and its data sets
model   the interface of image classifiers, and a multilayer perceptron
resnet  a residual network for small images
"""

from decjax.contrib.images.model import ImageModel, mlp
from decjax.contrib.images.resnet import resnet
from decjax.contrib.images.task import DATASETS, Dataset, Images, ImageTask

__all__ = ["DATASETS", "Dataset", "ImageModel", "ImageTask", "Images", "mlp", "resnet"]
