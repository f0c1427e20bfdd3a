"""Figures and hyperparameters that the paper prints, by network: nothing of ours is here."""

from __future__ import annotations

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
RANDOM = ("random-1", "random-2", "random-3")

Pair = tuple[float, float]

# network → criterion → (λ₁, λ₂) for each of RATIOS.
LAMBDAS: dict[str, dict[str, tuple[Pair, ...]]] = {
    "vgg16_cifar10": {
        "l2": ((6e-6, 1e-4), (4e-6, 6e-3), (1e-6, 0.01), (2e-6, 0.01), (4e-5, 2e-4)),
        "l2-gm": ((1e-6, 4e-3), (4e-6, 4e-3), (1e-6, 5e-3), (1e-6, 8e-3), (2e-5, 1e-4)),
        "l1": ((2e-6, 0.06), (2e-6, 1e-4), (4e-6, 1e-4), (1e-6, 1e-4), (1e-6, 0.01)),
        "random-1": ((0.9, 4e-4), (1e-5, 0.6), (1e-5, 2e-4), (1e-5, 9e-3), (1e-5, 3e-3)),
        "random-2": ((5e-6, 0.2), (6e-6, 0.2), (6e-6, 0.09), (3e-6, 0.02), (1e-5, 7e-5)),
        "random-3": ((1e-6, 0.2), (2e-6, 0.08), (2e-6, 9e-3), (2e-6, 9e-3), (4e-6, 7e-5)),
    },
    "resnet50_cifar100": {
        "l2": ((2e-5, 6e-3), (1e-5, 2e-3), (1e-5, 2e-3), (1e-5, 1e-3), (1e-6, 1e-3)),
        "l2-gm": ((2e-5, 1e-3), (1e-5, 1e-3), (1e-5, 2e-3), (1e-5, 1e-3), (1e-6, 1e-4)),
        "l1": ((2e-5, 1e-3), (2e-5, 1e-3), (1e-5, 1e-3), (1e-5, 1e-3), (1e-6, 1e-3)),
        "random-1": ((1e-5, 2e-3), (1e-5, 3e-3), (1e-5, 2e-3), (1e-5, 2e-3), (1e-5, 2e-3)),
        "random-2": ((2e-5, 2e-3), (4e-5, 1e-4), (3e-6, 2e-3), (8e-6, 7e-4), (6e-6, 9e-4)),
        "random-3": ((3e-6, 2e-3), (4e-6, 5e-3), (1e-6, 4e-3), (1e-6, 4e-3), (1e-6, 5e-3)),
    },
}

# network → random run → (threshold, balance) of neuron merging for each of RATIOS; with the other
# criteria they are 0.1 and 0.85 throughout.
MERGING: dict[str, dict[str, tuple[Pair, ...]]] = {
    "vgg16_cifar10": {
        "random-1": ((0.2, 0.7), (0.0, 0.75), (0.0, 0.75), (0.15, 0.7), (0.15, 0.75)),
        "random-2": ((0.25, 0.65), (0.15, 0.6), (0.15, 0.75), (0.05, 1.0), (0.45, 0.95)),
        "random-3": ((0.05, 0.8), (0.35, 0.05), (0.05, 1.0), (0.15, 1.0), (0.15, 1.0)),
    },
    "resnet50_cifar100": {
        "random-1": ((0.2, 0.5), (0.2, 0.5), (0.4, 0.6), (0.2, 0.5), (0.4, 1.0)),
        "random-2": ((0.15, 0.65), (0.05, 0.7), (0.15, 0.7), (0.4, 0.9), (0.1, 0.7)),
        "random-3": ((0.2, 0.95), (0.3, 0.55), (0.05, 0.9), (0.25, 0.55), (0.05, 1.0)),
    },
}

BASE = {"vgg16_cifar10": 93.7, "resnet50_cifar100": 78.82, "mobilenet_v2_imagenet": 71.88}

# network → criterion → method → accuracy at each ratio (random: the mean of the three runs).
# MobileNet-V2's ratios are 5 and 10 %.
ACCURACY: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "vgg16_cifar10": {
        "l2": {
            "lbyl": (92.04, 87.84, 83.25, 66.81, 45.71),
            "neuron-merging": (91.93, 87.24, 76.91, 54.32, 32.58),
            "none": (89.43, 71.77, 56.95, 31.74, 12.37),
        },
        "l2-gm": {
            "lbyl": (92.15, 87.97, 82.83, 67.19, 49.46),
            "neuron-merging": (91.82, 86.42, 75.58, 52.24, 32.13),
            "none": (88.83, 72.04, 52.40, 30.46, 11.71),
        },
        "l1": {
            "lbyl": (91.85, 89.51, 81.80, 56.63, 43.32),
            "neuron-merging": (91.97, 86.93, 75.01, 52.54, 27.87),
            "none": (89.85, 73.64, 49.79, 17.78, 10.43),
        },
        "random": {
            "lbyl": (88.05, 75.24, 45.67, 31.34, 21.56),
            "neuron-merging": (86.52, 63.33, 46.86, 26.79, 18.08),
            "none": (74.87, 37.19, 12.81, 10.00, 10.00),
        },
    },
    "resnet50_cifar100": {
        "l2": {
            "lbyl": (78.14, 76.15, 73.29, 65.21, 52.61),
            "neuron-merging": (77.28, 72.73, 64.47, 46.40, 25.98),
            "none": (75.14, 63.39, 39.96, 15.32, 5.22),
        },
        "l2-gm": {
            "lbyl": (78.01, 76.36, 72.97, 65.78, 54.04),
            "neuron-merging": (76.92, 72.32, 64.01, 46.17, 23.44),
            "none": (74.49, 63.54, 39.01, 13.14, 4.32),
        },
        "l1": {
            "lbyl": (78.25, 75.71, 72.07, 62.64, 49.07),
            "neuron-merging": (77.21, 72.24, 63.07, 45.98, 21.98),
            "none": (75.07, 61.84, 35.77, 12.59, 4.25),
        },
        "random": {
            "lbyl": (76.53, 73.29, 69.05, 59.49, 43.51),
            "neuron-merging": (72.46, 59.44, 40.42, 20.89, 8.77),
            "none": (59.32, 19.27, 3.25, 2.59, 2.77),
        },
    },
    "mobilenet_v2_imagenet": {
        "l2": {
            "lbyl": (67.46, 53.41),
            "neuron-merging": (67.1, 52.66),
            "none": (61.97, 29.06),
        },
        "l2-gm": {
            "lbyl": (67.64, 52.26),
            "neuron-merging": (63.68, 46.8),
            "none": (62.53, 28.21),
        },
        "l1": {
            "lbyl": (67.25, 54.95),
            "neuron-merging": (67.64, 52.1),
            "none": (63.27, 32.08),
        },
    },
}

# WARE threshold → method → (accuracy, million parameters, GMACs), ResNet-50/CIFAR-100.
ADAPTIVE: dict[float, dict[str, tuple[float, float, float]]] = {
    0.1: {
        "lbyl": (69.66, 17.47, 0.74),
        "neuron-merging": (66.07, 20.01, 0.90),
        "none": (62.31, 20.13, 0.95),
    },
    0.3: {
        "lbyl": (65.58, 14.80, 0.95),
        "neuron-merging": (47.1, 14.83, 0.70),
        "none": (24.61, 14.85, 0.73),
    },
    0.5: {
        "lbyl": (41.53, 10.49, 0.53),
        "neuron-merging": (6.6, 10.49, 0.53),
        "none": (4.65, 10.49, 0.53),
    },
}
