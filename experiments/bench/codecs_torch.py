"""Codecs as one would write them in PyTorch, timed on request; `experiments.bench.codecs` starts it under an interpreter that has
torch.
"""
# pyright: reportMissingImports=false

import math
import sys
import time

import torch

from experiments.bench.cluster.serve import serve
from launch import memory

BLOCK, FRACTION, RANK, CHUNK, COEFFICIENTS = 256, 0.01, 4, 64, 32


def block_codec(levels, width, stochastic=False, euclidean=False, dtype=torch.int8):
    per = 8 // width
    shifts = torch.arange(per, dtype=torch.uint8) * width

    def encode(x):
        x = x.view(-1, BLOCK)
        scale = (x.norm(dim=1, keepdim=True) if euclidean else x.abs().amax(1, keepdim=True)).clamp_min(1e-30) / levels
        steps = x / scale
        if dtype.is_floating_point:
            return steps.to(dtype), scale
        steps = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
        if per == 1:
            return steps.to(dtype), scale
        codes = (steps + levels).to(torch.uint8).view(-1, per)
        return (codes << shifts).sum(1, dtype=torch.uint8), scale

    def decode(message):
        codes, scale = message
        if per > 1:
            codes = ((codes[:, None] >> shifts) & (2**width - 1)).view(-1, BLOCK).float() - levels
        return (codes.float() * scale).view(-1)

    return encode, decode


def cast(dtype):
    return lambda x: x.to(dtype), lambda message: message.float()


BITS = 2 ** torch.arange(8, dtype=torch.uint8)


def sign_bits(x):
    return ((x >= 0).view(-1, 8) * BITS).sum(1, dtype=torch.uint8)


def signs(packed):
    return ((packed[:, None] & BITS) != 0).float().mul(2).sub(1).view(-1)


def natural():
    def encode(x):
        code = (x.view(torch.int32) + torch.randint(0, 2**23, x.shape, dtype=torch.int32)) >> 23
        return (code & 255).to(torch.uint8), sign_bits(x)

    return encode, lambda message: (message[0].int() << 23).view(torch.float32) * signs(message[1])


def topk(size, multiple=0.0):
    def encode(x):
        where = x.abs().topk(math.ceil(FRACTION * size)).indices
        values = x[where]
        return torch.where(values.abs() >= multiple * x.square().mean().sqrt(), values, 0) if multiple else values, where

    return encode, lambda message: torch.zeros(size).scatter_(0, message[1], message[0])


def groups(size, random=False):
    group = round(1 / FRACTION)
    lanes = math.ceil(size / group)

    def encode(x):
        x = torch.nn.functional.pad(x, (0, group * lanes - size)).view(group, lanes)
        where = torch.randint(0, group, (1, lanes)) if random else x.abs().max(0, keepdim=True).indices
        return x.gather(0, where), where

    return encode, lambda message: torch.zeros(group, lanes).scatter_(0, message[1], message[0]).view(-1)[:size]


def low_rank(size):
    side = math.isqrt(size)
    q = torch.randn(side, RANK)

    def encode(x):
        x = x.view(side, side)
        p = torch.linalg.qr(x @ q)[0]
        return p, x.T @ p

    return encode, lambda message: message[0] @ message[1].T


def dct(size):
    side = math.isqrt(size)
    u = torch.arange(CHUNK)
    basis = math.sqrt(2 / CHUNK) * torch.cos(math.pi * u[:, None] * (2 * u + 1) / (2 * CHUNK))
    basis[0] = math.sqrt(1 / CHUNK)
    n = side // CHUNK

    def encode(x):
        coefficients = torch.einsum("ui,minj,vj->mnuv", basis, x.view(n, CHUNK, n, CHUNK), basis).reshape(n * n, -1)
        where = coefficients.abs().topk(COEFFICIENTS, dim=1).indices
        return coefficients.gather(1, where), where

    def decode(message):
        coefficients = torch.zeros(n * n, CHUNK**2).scatter_(1, message[1], message[0]).view(n, n, CHUNK, CHUNK)
        return torch.einsum("ui,mnuv,vj->minj", basis, coefficients, basis)

    return encode, decode


def bounded(bound=1e-3, levels=127):
    def encode(x):
        steps = (x / (2 * bound)).round()
        outside = (steps.abs() > levels).nonzero().view(-1)
        return (steps.clamp(-levels, levels) + levels).to(torch.uint8), outside, x[outside]

    def decode(message):
        codes, outside, values = message
        x = (codes.float() - levels) * (2 * bound)
        x[outside] = values
        return x

    return encode, decode


def equivalents(size):
    return {
        "identity": (torch.clone, torch.clone),
        "bfloat16": cast(torch.bfloat16),
        "float16": cast(torch.float16),
        "float8_e4m3": block_codec(448, 8, dtype=torch.float8_e4m3fn),
        "float8_e5m2": block_codec(57344, 8, dtype=torch.float8_e5m2),
        "int8": block_codec(127, 8),
        "int4": block_codec(7, 4),
        "int2": block_codec(1, 2),
        "int8 stochastic": block_codec(127, 8, True),
        "int4 stochastic": block_codec(7, 4, True),
        "qsgd": block_codec(7, 4, True, True),
        "ternary": block_codec(1, 2, True),
        "natural": natural(),
        "sign": (sign_bits, signs),
        "scaled_sign": (
            lambda x: (sign_bits(x), x.abs().view(-1, 1024).mean(1, keepdim=True)),
            lambda message: (signs(message[0]).view(-1, 1024) * message[1]).view(-1),
        ),
        "topk": topk(size),
        "threshold": topk(size, 1.0),
        "block_topk": groups(size),
        "randomk": groups(size, True),
        "low_rank": low_rank(size),
        "dct": dct(size),
        "bounded": bounded(),
    }


def main():
    memory.keep_freed()
    torch.set_num_threads(1)
    size = int(sys.argv[1])
    x, codecs = torch.randn(size), equivalents(size)

    def times_s(name):
        """Return the seconds of one encode and one decode; None if there is no equivalent."""
        if name not in codecs:
            return None
        encode, decode = codecs[name]
        begun = time.perf_counter()
        message = encode(x)
        between = time.perf_counter()
        decode(message)
        return between - begun, time.perf_counter() - between

    serve({"version": lambda: torch.__version__, "times_s": times_s})


if __name__ == "__main__":
    main()
