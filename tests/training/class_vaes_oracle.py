"""Autoencoders one at a time, in plain float64 with torch's own Adam; only the random streams are the package's."""

from __future__ import annotations

import math

import torch

from fcl_bench.methods.autoencoders.fedcbc import FedCBC, VAETraining
from fcl_bench.methods.autoencoders.fitting import latents_of
from fcl_bench.methods.autoencoders.networks import Architecture, further, normals, orders, uniforms

SMALL = Architecture(5, 4, 3)
FIT = FedCBC(VAETraining(epochs=4, batch_size=3, lr=0.01, weight_decay=0.1), 4, 3, kl=0.5, samples=6)


def plain_parts(weights: torch.Tensor, d: int = 5, h: int = 4, latent: int = 3) -> list[torch.Tensor]:
    """W1, b1, W_m, b_m, W_v, b_v, W2, b2, W3, b3 of one row, in float64."""
    shapes = [(h, d), (h,), (latent, h), (latent,), (latent, h), (latent,), (h, latent), (h,), (d, h), (d,)]
    found, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        found.append(weights[begin:end].double().reshape(shape))
        begin = end
    assert begin == len(weights)
    return found


def plain_posterior(parts, x):
    W1, b1, Wm, bm, Wv, bv = parts[:6]
    hidden = torch.tanh(x @ W1.T + b1)
    return hidden @ Wm.T + bm, hidden @ Wv.T + bv


def plain_decoded(parts, z):
    W2, b2, W3, b3 = parts[6:]
    return 1 / (1 + torch.exp(-(torch.tanh(z @ W2.T + b2) @ W3.T + b3)))


def plain_kl(m, v, m2, v2):
    """Between one-dimensional Gaussians, summed: log(s2 / s1) + (s1^2 + (m1 - m2)^2) / (2 s2^2) - 1/2."""
    s, s2 = torch.exp(v / 2), torch.exp(v2 / 2)
    return (torch.log(s2 / s) + (s**2 + (m - m2) ** 2) / (2 * s2**2) - 0.5).sum(dim=-1)


def plain_loss(parts, x, noise, kl):
    m, v = plain_posterior(parts, x)
    zero = torch.zeros_like(m)
    z = m if noise is None else m + torch.exp(v / 2) * noise
    return ((plain_decoded(parts, z) - x) ** 2).sum(dim=1) + kl * plain_kl(m, v, zero, zero), m, v


def plain_fit(weights, x, key, wanted=None, fit=FIT):
    """torch's own Adam on one class's samples, by the class's own stream."""
    parts = [part.clone().requires_grad_() for part in plain_parts(weights)]
    knobs = fit.training
    adam = torch.optim.Adam(parts, lr=knobs.lr, weight_decay=knobs.weight_decay)
    for epoch in range(knobs.epochs):
        of_epoch = further(key, epoch)
        order = orders(of_epoch, torch.tensor([len(x)]))[0]
        for step, begin in enumerate(range(0, len(x), knobs.batch_size)):
            rows = order[begin : begin + knobs.batch_size]
            of_step = further(of_epoch, step)
            noise = normals(of_step, len(rows) * 3).view(len(rows), 3).double()
            loss, m, v = plain_loss(parts, x[rows].double(), noise, fit.kl)
            if wanted is not None:
                alpha, mean, log_variance = wanted
                loss = loss + alpha * plain_kl(m, v, mean[rows].double(), log_variance[rows].double())
            adam.zero_grad()
            loss.mean().backward()
            adam.step()
    return torch.cat([part.detach().flatten() for part in parts])


def plain_fused(teachers, key, known, method=FIT):
    """Of one class, teacher by teacher."""
    at = len(teachers) - 1 if known else int(uniforms(further(key, 0), 1) * len(teachers))
    latents = latents_of(method, further(key, 1))[0].double()
    parts = [plain_parts(teacher) for teacher in teachers]
    x = torch.cat([plain_decoded(own, latents) for own in parts])
    means, log_variances = zip(*(plain_posterior(own, x) for own in parts), strict=True)
    wanted = (method.alpha, sum(means) / len(parts), sum(log_variances) / len(parts)) if method.alpha else None
    return plain_fit(teachers[at], x, further(key, 2), wanted, method)
