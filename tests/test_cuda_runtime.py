"""The CUDA runtime of PyTorch: found where PyTorch was built with it, and no error where it was not."""

import torch

from tierkv import cuda_runtime


def test_it_is_found_where_pytorch_has_it():
    assert (cuda_runtime.library() is not None) == (torch.version.cuda is not None)


def test_forgetting_an_error_is_always_possible():
    cuda_runtime.forget_error()
