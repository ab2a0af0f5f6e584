"""Settings that `fedvlm.run` and `fedvlm.sweep` take, for type checkers; a test compares them with the registry."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class MethodSettings(TypedDict, total=False):
    """Settings of the methods of fedvlm; pass a method of your own as an object with its settings."""

    adaptation: bool
    adaptation_weight: float
    alpha: float
    attention_heads: int
    average: Literal["factors", "products"]
    batch_size: int
    betas: Sequence[float]
    blocks: int | Literal["auto"]
    calibration: Literal["leave-one-out", "held-out"]
    class_prior: bool
    class_weights: Literal["none", "balanced"]
    classifier: Literal["nb", "lda", "qda"]
    clip: float
    contrast_temperature: float
    contrast_weight: float
    covariance: Literal["spherical", "diagonal"]
    ctx_init: Literal["random", "template"]
    damping: float
    delta: float
    depth: int
    distil: float
    entropy_reg: float
    eps: float
    experts: int
    feature_norm: float
    form: Literal["server-coop", "random-meta", "all-global"]
    fusion: bool
    gamma: float
    gate_dim: int
    gate_heads: int
    gate_scale: float
    head: Literal["text", "random"]
    head_epochs: int
    iterations: int
    local_epochs: int
    local_head: bool
    local_norm: bool
    local_vectors: int
    local_weight: float
    lr: float
    map_epochs: int
    mask: Literal["full", "deeper", "no norm", "no second", "linear, norm", "linear"]
    mask_duplicates: bool
    max_samples: int
    min_class_clients: int
    min_class_samples: int
    mix: float
    mixtures: int
    momentum: float
    mu: float
    n_ctx: int | None
    noise_multiplier: float
    passes: Literal["joint", "apart"]
    persist: bool
    precision_factor: Literal["posterior", "dim"]
    prior: float
    prompts: int
    prompts_per_client: int
    prox_weight: float
    rank: int
    reference: Literal["public", "target"]
    ridge: float | None
    rounds: int
    server_epochs: int
    server_lr: float
    shared_discriminator: bool
    sharpness: float
    shrinkage: float
    sigma: float
    targets: Sequence[str]
    tau: float
    temperature: float
    text_mean: Literal["voters", "clients"]
    transport: Literal["unbalanced", "classical", "averaging"]
    units: int
    visual: bool
    weight_decay: float
    width: int


class RunSettings(MethodSettings, total=False):
    """Settings of a run and of its method."""

    warm_start: Any
    data: str
    encoder: str
    source: Mapping[str, Any]
    access: Mapping[str, Any]
    precision: Literal["float32", "float16"]
    descriptions: str
    texts: str
    clients: Any
    protocol: str
    selection: Literal["last", "validation", "oracle"]
    group_metrics: Literal["image", "mean", "max"]
    subgroups: Sequence[str] | str
    ordered: bool
    seeds: Sequence[int]
    tune: Sequence[str] | str
    fraction: float
    counts: Sequence[int] | int
    unseen: int
    target: Sequence[str] | str
    global_test: bool
    centralised: bool
    engine: Literal["batched", "single", "flower"]
    device: Literal["auto", "cpu", "cuda", "mps"]
    workers: int
    transductive: bool
    allow_small: bool
    smoke: bool
    channel: Any
    attack: Literal["none", "sign-flip", "scale", "label-flip", "noise", "collude"]
    attacker_fraction: float
    attack_strength: float
    purpose: str
    contact: str
    reproduces: Sequence[str] | str
