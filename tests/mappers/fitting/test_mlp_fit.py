"""Training networks: what they learn beside a linear map, determinism, passes, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from cluster.errors import MapperError
from mappers.fitting.mlp_fit import fit_mlp, layers_that_fit, training_bytes
from mappers.fitting.mlp_train import Batch, Batches, LayerTraining, MlpSettings, new_networks
from mappers.geometry import KVGeometry
from mappers.manifest import LayerR2, Support
from mappers.mlp import MlpMapper, mlp_tensors
from mappers.rope import Rope
from mappers.weights import LinearWeights
from tests.mappers.tiny import print_of, rope

SOURCE = KVGeometry(2, 2, 4)
SETTINGS = MlpSettings(
    hidden=16,
    learning_rate=1e-2,
    batch_tokens=128,
    max_epochs=12,
    compute_dtype=torch.float32,
)
Target = Callable[[torch.Tensor], torch.Tensor]


def bent(x_NHD: torch.Tensor) -> torch.Tensor:
    """|x|, with a mean and a scale that training has to find."""
    return 5 + 10 * x_NHD.abs()


def straight(x_NHD: torch.Tensor) -> torch.Tensor:
    return 5 - 10 * x_NHD.flip(-1)


def tokens_of(
    function: Target, tokens: int, seed: int, target: KVGeometry = SOURCE, batch: int = 500
) -> Batches:
    """Target layer l is a function of source layer l, head for head, or of the head before it."""

    def batches() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(tokens // batch):
            k_SNHD, v_SNHD = torch.randn(2, 2, batch, 2, 4, generator=generator)
            k_LNHD, v_LNHD = (
                function(x.repeat_interleave(target.kv_heads // 2, dim=2)) for x in (k_SNHD, v_SNHD)
            )
            yield k_SNHD, v_SNHD, k_LNHD, v_LNHD

    return batches


def least_squares(
    train: Batches, unseen: Batches, support: Support, chosen: tuple[tuple[int, ...], ...]
) -> tuple[LinearWeights, LayerR2]:
    """The best linear map and its R2 on unseen tokens."""
    data, test = (
        [torch.cat(kv, dim=1) for kv in zip(*batches(), strict=True)] for batches in (train, unseen)
    )
    number = 1 if support == "full" else 2

    def features(x_SNHD: torch.Tensor, layers: tuple[int, ...], group: int) -> torch.Tensor:
        heads = slice(None) if number == 1 else slice(group, group + 1)
        x_NF = torch.cat([x_SNHD[layer, :, heads].flatten(1) for layer in layers], dim=1)
        return torch.cat([x_NF, torch.ones(len(x_NF), 1)], dim=1)

    weights: list[torch.Tensor] = []
    scores: list[list[float]] = []
    for part in (0, 1):
        solved, r2 = [], []
        for layer, layers in enumerate(chosen):
            y_NGO, unseen_NGO = (
                kv[part + 2][layer].reshape(kv[0].shape[1], number, -1) for kv in (data, test)
            )
            gaps, per_group = [], []
            for group in range(number):
                x_NF = features(data[part], layers, group)
                per_group.append(torch.linalg.lstsq(x_NF, y_NGO[:, group]).solution)
                x_NF = features(test[part], layers, group)
                gaps.append(x_NF @ per_group[-1] - unseen_NGO[:, group])
            total = (unseen_NGO - unseen_NGO.mean(0)).square().sum()
            r2.append(float(1 - torch.stack(gaps).square().sum() / total))
            solved.append(torch.stack(per_group))
        weight_LGFO = torch.stack(solved)
        weights += [weight_LGFO[:, :, :-1], weight_LGFO[:, :, -1]]
        scores.append(r2)
    return LinearWeights(chosen, *weights), LayerR2(k=tuple(scores[0]), v=tuple(scores[1]))


@pytest.mark.parametrize(("support", "heads"), [("full", 2), ("head_local", 2), ("full", 4)])
def test_networks_learn_a_nonlinear_target_that_a_linear_map_cannot(
    support: Support, heads: int
) -> None:
    target = KVGeometry(2, heads, 4)
    train, unseen = (tokens_of(bent, n, n, target) for n in (4_000, 1_000))
    linear, of_linear = least_squares(train, unseen, support, ((0, 1), (0, 1)))
    _, r2 = fit_mlp(SOURCE, target, linear.source_layers, support, train, unseen, SETTINGS)
    assert max(of_linear.k + of_linear.v) < 0.1
    assert min(r2.k + r2.v) > 0.8


def test_networks_come_near_a_linear_map_on_a_linear_target() -> None:
    train, unseen = tokens_of(straight, 4_000, 0), tokens_of(straight, 1_000, 1)
    linear, of_linear = least_squares(train, unseen, "full", ((0,), (1,)))
    _, r2 = fit_mlp(SOURCE, SOURCE, linear.source_layers, "full", train, unseen, SETTINGS)
    assert min(of_linear.k + of_linear.v) > 0.999
    assert min(r2.k + r2.v) > 0.97


@pytest.mark.parametrize("support", ["full", "head_local"])
def test_beside_a_linear_map_they_begin_with_what_it_reaches(support: Support) -> None:
    train, unseen = tokens_of(straight, 4_000, 0), tokens_of(straight, 1_000, 1)
    linear, of_linear = least_squares(train, unseen, support, ((0,), (1,)))
    untrained = replace(SETTINGS, max_epochs=0)
    _, r2 = fit_mlp(
        SOURCE, SOURCE, linear.source_layers, support, train, unseen, untrained, linear=linear
    )
    assert r2.k == pytest.approx(of_linear.k, abs=1e-5)
    assert r2.v == pytest.approx(of_linear.v, abs=1e-5)


def test_beside_a_linear_map_they_learn_what_it_leaves_over() -> None:
    def both(x_NHD: torch.Tensor) -> torch.Tensor:
        return straight(x_NHD) + bent(x_NHD)

    train, unseen = tokens_of(both, 4_000, 0), tokens_of(both, 1_000, 1)
    linear, of_linear = least_squares(train, unseen, "full", ((0,), (1,)))
    _, r2 = fit_mlp(
        SOURCE, SOURCE, linear.source_layers, "full", train, unseen, SETTINGS, linear=linear
    )
    assert max(of_linear.k + of_linear.v) < 0.8
    assert min(r2.k + r2.v) > 0.9


@pytest.mark.parametrize("residual", [False, True])
def test_the_mapper_reaches_the_r2_that_training_reports(residual: bool) -> None:
    train, unseen = tokens_of(bent, 2_000, 0), tokens_of(bent, 1_000, 1)
    linear, _ = least_squares(train, unseen, "full", ((0,), (1,)))
    weights, r2 = fit_mlp(
        SOURCE,
        SOURCE,
        linear.source_layers,
        "full",
        train,
        unseen,
        replace(SETTINGS, max_epochs=4),
        linear=linear if residual else None,
    )
    spec = rope(head_dim=4)
    shape = print_of(layers=2, kv_heads=2, head_dim=4, rope=spec)
    mapper = MlpMapper(shape, shape, weights, compute_dtype=torch.float32, dtype=torch.float32)
    turn = Rope(spec)
    k_x, v_x, k_y, v_y = (torch.cat(part, dim=1) for part in zip(*unseen(), strict=True))
    positions = turn.positions(40, k_x.shape[1])
    k_out, v_out = mapper.apply(turn.apply(k_x, positions), v_x, 40)
    for out, y, reported in (
        (turn.strip(k_out, positions), k_y, r2.k),
        (v_out, v_y, r2.v),
    ):
        error_L = (out - y).square().sum((1, 2, 3))
        total_L = (y - y.mean(1, keepdim=True)).square().sum((1, 2, 3))
        assert (1 - error_L / total_L).tolist() == pytest.approx(reported, abs=1e-4)


def test_the_same_seed_gives_the_same_weights_in_however_many_passes() -> None:
    train, unseen = tokens_of(bent, 1_000, 0), tokens_of(bent, 500, 1)
    settings = replace(SETTINGS, max_epochs=6, patience=1)

    def fitted(layers_per_pass: int, seed: int) -> tuple[dict[str, torch.Tensor], int]:
        steps: list[int] = []
        weights, _ = fit_mlp(
            SOURCE,
            SOURCE,
            ((0,), (1,)),
            "full",
            train,
            unseen,
            replace(settings, seed=seed),
            layers_per_pass=layers_per_pass,
            advance=steps.append,
        )
        return mlp_tensors(weights), sum(steps)

    together, tokens = fitted(2, 0)
    apart, more_tokens = fitted(1, 0)
    assert more_tokens > tokens
    for name, tensor in together.items():
        torch.testing.assert_close(apart[name], tensor)
    assert not torch.equal(fitted(2, 1)[0]["k_first_LHFU"], together["k_first_LHFU"])


def test_the_first_token_is_learned_when_it_counts_more() -> None:
    """One token in fifty is unlike the others, as the first of a sequence is."""

    def data(sequences: int, seed: int) -> Batches:
        plain = tokens_of(straight, 500 * sequences, seed)

        def batches() -> Iterator[Batch]:
            for k_x, v_x, k_y, v_y in plain():
                for x, y in ((k_x, k_y), (v_x, v_y)):
                    y[:, ::50] = x[:, ::50].abs() * 10 - 5
                    x[:, ::50] += 2
                yield k_x, v_x, k_y, v_y

        return batches

    def first_error(weight: int) -> float:
        settings = replace(SETTINGS, first_token_weight=weight, sequence_tokens=50)
        weights, _ = fit_mlp(SOURCE, SOURCE, ((0,), (1,)), "full", data(4, 0), data(1, 1), settings)
        shape = print_of(layers=2, kv_heads=2, head_dim=4, rope=rope(head_dim=4))
        mapper = MlpMapper(shape, shape, weights, compute_dtype=torch.float32, dtype=torch.float32)
        k_x, v_x, _, v_y = next(data(1, 2)())
        _, v_out = mapper.apply(k_x[:, ::50], v_x[:, ::50], 0)
        return float((v_out - v_y[:, ::50]).square().mean())

    assert first_error(50) < 0.7 * first_error(1)


def test_a_network_out_of_patience_keeps_its_best_and_the_others_go_on() -> None:
    net = new_networks(4, (2, 4), 8, torch.Generator().manual_seed(0))
    layer = LayerTraining(net, (0,), 1, torch.ones(2, 4), patience=2)
    for epoch, errors in enumerate(([3.0, 3.0], [2.0, 2.0], [4.0, 1.5], [5.0, 1.2], [0.1, 1.0])):
        net.last_bias_HD.fill_(float(epoch))
        layer.judge(torch.tensor(errors), torch.tensor(errors) / 2)
    assert layer.best_error_H.tolist() == [1.0, 0.5]
    assert layer.best.last_bias_HD[:, 0].tolist() == [1.0, 4.0]
    assert not layer.ended
    for _ in range(2):
        layer.judge(torch.tensor([0.1, 1.0]), torch.zeros(2))
    assert layer.ended


def test_memory_is_that_of_the_networks_and_decides_how_many_layers_train_together() -> None:
    source, target = KVGeometry(36, 8, 128), KVGeometry(64, 8, 128)
    settings = MlpSettings()
    one, two = (
        training_bytes(source, target, 8, "full", settings, residual=False, layers=layers)
        for layers in (1, 2)
    )
    per_layer = 2 * 8 * (8_192 * 1_024 + 1_024 * 1_024 + 1_024 * 128)
    assert two - one == 20 * per_layer
    assert one > (24 + 63 * 4) * per_layer

    def fits(available: int) -> int:
        return layers_that_fit(source, target, 8, "full", settings, available, residual=False)

    assert [fits(one), fits(two - 1), fits(two), fits(10**15)] == [1, 1, 2, 64]
    with pytest.raises(MapperError, match="one layer at a time"):
        fits(one - 1)


def test_what_cannot_be_trained_is_refused() -> None:
    train = tokens_of(bent, 500, 0)
    with pytest.raises(MapperError, match="sequence_tokens"):
        fit_mlp(
            SOURCE,
            SOURCE,
            ((0,), (1,)),
            "full",
            train,
            train,
            replace(SETTINGS, first_token_weight=2),
        )
    linear, _ = least_squares(train, train, "head_local", ((0,), (1,)))
    for chosen in (((0,), (1,)), ((1,), (0,))):
        with pytest.raises(MapperError, match="other features"):
            fit_mlp(SOURCE, SOURCE, chosen, "full", train, train, SETTINGS, linear=linear)
