"""Attack your own training run: does the bill hold?

    python examples/audit_white_box.py

Train on scikit-learn's digits with canaries beside the records. Each canary is in or out by a fair
coin and has a coordinate of its own in every released gradient. An attack that recognizes the
members better than the bill (the epsilon that was charged) allows has found a bug. The second run
has such a bug: it adds a quarter of the billed noise.
"""

import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.auditing import GradientCanaries, noise_bound, one_run, refute_event
from tacit.training.noise import NoisyMean

DELTA, CLIP, CANARIES = 1e-5, 0.1, 4000
SEED = 0  # so that the output is the same each time; a real run uses no seed


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def audit() -> bool:
    data = tacit.datasets.load("digits")
    x, y = torch.from_numpy(data.x_train).flatten(1), torch.from_numpy(data.y_train)
    torch.manual_seed(SEED)
    canaries = GradientCanaries(CANARIES, clip_norm=CLIP, rng=SEED)
    model, records, loss = canaries.plant(nn.Linear(64, 10), (x, y), loss_fn)
    n_records = len(x) + CANARIES // 2  # declared: half of the canaries are expected in
    private = tacit.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=8.0, momentum=0.9),
        records,
        loss,
        batch_size=n_records // 4,
        epochs=8,
        clip_norm=CLIP,
        epsilon=4.0,
        delta=DELTA,
        n_records=n_records,
        seed=SEED,
    )
    for lot in canaries.watch(private):  # the only line of the loop that changes
        private.step(lot)
    bill, scores, inside = private.epsilon(delta=DELTA), canaries.scores, canaries.is_member
    coins_alone = one_run(scores, inside, delta=DELTA, expected_epsilon=bill)
    sharper = noise_bound(scores, inside, private.event, delta=DELTA)
    test = refute_event(scores, inside, private.event, independent=True)
    print(f"bill {bill:.2f}: at least {coins_alone.epsilon_lower:.2f} assuming only fair coins,")
    print(f"at least {sharper.epsilon_lower:.2f} assuming {sharper.assumes};")
    print(f"p-value of the bill {test.p_value:.2g}.\n")
    return not test.is_refuted


def main() -> None:
    print("As it is:")
    assert audit()

    def too_quiet(self, sums, scales, *, noise_multiplier, **options):
        return honest(self, sums, scales, noise_multiplier=noise_multiplier / 4, **options)

    honest, NoisyMean.release = NoisyMean.release, too_quiet
    try:
        print("With a quarter of the noise:")
        assert not audit()
    finally:
        NoisyMean.release = honest


if __name__ == "__main__":
    main()
