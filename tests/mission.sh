#!/usr/bin/env bash
# One command, or a few lines of Python with public names, for each row of the mission, in the order
# of the clauses of the design's paragraph "The mission's rows". Each asserts its result.
#
#   bash tests/mission.sh          all rows: prints `ok N name`, `skip N name: why` or `FAIL N name`
#   bash tests/mission.sh 7 9      some rows
#   ENGINES="duckdb dask" bash tests/mission.sh 17
#
# Runs in a temporary folder. PYTHON names the interpreter (.venv/bin/python), TACIT_DATA the folder
# of the real data sets (../shared/data). The status is 1 if a row fails.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
data=${TACIT_DATA:-$root/../shared/data}
export PYTHONPATH=${PYTHONPATH-$root} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
export XDG_CACHE_HOME=$here/cache # nothing is taken from earlier runs

tacit() { "$python" -m tacit "$@"; }

py() { # run Python from standard input, with what most checks need
  cat - > check.py << PY
import json, re
from pathlib import Path

import numpy as np
import tacit
from tacit import events as ev

ROOT = "$root"

def load(name):
    return json.loads(Path(name).read_text())

def figures(folder):
    """Return the names of a folder's figures; each is a drawing and has data beside it."""
    found = sorted(Path(folder).glob("*.svg"))
    assert found, folder
    for one in found:
        assert "<svg" in one.read_text() and len(one.read_text()) > 2000, one
        assert list(Path(folder).glob(f"{one.stem}*.csv")), one
    return [one.stem for one in found]

def page(name):
    assert "</html>" in Path(name).read_text() and len(Path(name).read_text()) > 10_000, name

$(cat)
PY
  "$python" -W ignore check.py
}

refuses() { # the command must end with the given status
  wanted=$1
  shift
  status=0
  "$@" || status=$?
  [ "$status" = "$wanted" ] || { echo "status $status, not $wanted: $*"; return 1; }
}

skip() { echo "$*" > skipped; exit 77; }
note() { echo "$*" >> notes; }
needs() { for file in "$@"; do [ -e "$data/$file" ] || skip "no $file in $data: set TACIT_DATA"; done; }

wages() { # a table of people and their wages, its schema, and the vertices of a polytope
  py << 'PY'
rng, n = np.random.default_rng(0), 6_000
age, schooling = rng.integers(18, 66, n), rng.integers(8, 19, n)
region = rng.choice(["north", "south", "west"], n, p=[0.5, 0.3, 0.2])
wage = np.clip(5 + 0.2 * age + 1.1 * schooling + rng.normal(0, 4, n), 0, 60)
rows = [f"{a},{s},{r},{w:.2f},{int(w > 27)}" for a, s, r, w in zip(age, schooling, region, wage)]
Path("wages.csv").write_text("\n".join(["age,schooling,region,wage,high", *rows]) + "\n")
columns = "[columns]\nage = [18, 65]\nschooling = [8, 18]\n"
Path("wages.toml").write_text(f'target = "wage"\n{columns}wage = [0, 60]\n')
np.savetxt("simplex.csv", [[0, 0], [0.8, 0], [0, 0.8]], delimiter=",")
PY
}

names[1]="DP-SGD by lots and batches, with flat, per-layer and scheduled clipping"
row_1() {
  py << 'PY'
import torch
from torch.nn import functional as F
from tacit.training import PerLayer, Ramp, ScheduledClip, Speed

torch.manual_seed(0)
x = torch.randn(2_000, 10)
y = (x[:, 0] + x[:, 1] > 0).long()

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")

def trained(clip=lambda model: 1.0, by="lots", **options):
    torch.manual_seed(1)
    layers = torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = tacit.make_private(
        model, optimizer, (x, y), loss_fn, batch_size=200, epochs=5, clip_norm=clip(model),
        epsilon=2.0, delta=1e-5, seed=0, **options)
    if by == "lots":
        for lot in private:
            private.step(lot)
    else:
        for _ in private:
            private.backward()
            optimizer.step()
    assert private.steps_taken == private.steps == 50
    assert 1.99 < private.epsilon(delta=1e-5) <= 2.0
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    assert accuracy > 0.9, accuracy
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), private

lots, plan = trained()
batches, _ = trained(by="batches", speed=Speed(max_microbatch=64))  # a lot in parts is the same lot
assert torch.allclose(lots, batches, atol=1e-4), (lots - batches).abs().max()
per_layer, _ = trained(lambda model: PerLayer.split(model, 1.0))
scheduled, other = trained(lambda model: ScheduledClip(1.0, Ramp(1.0, 0.5)))
assert other.noise_multiplier == plan.noise_multiplier  # a schedule of clip norms is free
assert not torch.allclose(lots, per_layer) and not torch.allclose(lots, scheduled)
PY
}

names[2]="moments accountant (1.26), strong composition (9.34) and asymptotic bound beside the price"
row_2() {
  tacit epsilon --rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5 --compare --json > e.json
  tacit curve --rate 0.01 --noise-multiplier 4 --steps 10000 --over steps --out curve.svg
  py << 'PY'
found = load("e.json")
by_name = {row["accountant"]: row["epsilon"] for row in found["accountants"]}
assert round(by_name["Moments"], 2) == 1.26
assert round(by_name["StrongComposition"], 2) == 9.34
assert found["lower"] <= found["epsilon"] <= 1.0001 * found["lower"]
assert round(found["epsilon"], 4) == 0.9469
noise = tacit.accounting.asymptotic_noise(rate=0.01, steps=10_000, epsilon=1.0, delta=1e-5)
assert round(noise, 3) == 3.393
assert figures(".") == ["curve"]
PY
}

names[3]="guidance on hyperparameters"
row_3() {
  tacit advise --records 20000 --columns 30 --epsilon 0.5 --json > advice.json
  tacit calibrate --epsilon 0.5 --delta 5e-6 --rate 0.125 --steps 160 --json > noise.json
  py << 'PY'
advice = load("advice.json")
rate, steps = advice["batch_size"] / 20_000, round(advice["epochs"] * 20_000 / advice["batch_size"])
step = ev.PoissonSampled(rate, ev.Gaussian(advice["noise_multiplier"]))
assert 0.49 < tacit.epsilon(ev.Repeated(step, steps), delta=advice["delta"]) <= 0.5
assert (rate, steps) == (0.125, 160)  # those of `tacit calibrate` above
assert abs(load("noise.json")["noise_multiplier"] / advice["noise_multiplier"] - 1) < 1e-3
assert advice["learning_rate"] > 0 and advice["clip_norm"] > 0 and advice["in_words"]
PY
}

names[4]="linear regression by the functional mechanism, epsilon1 + epsilon2, on two censuses"
row_4() {
  needs census/california_housing_1990.csv.gz census/fertility_us1980.csv.gz
  cat > fertility.toml << 'TOML'
target = "work"
[columns]
morekids = ["no", "yes"]
age = [20, 36]
afam = ["no", "yes"]
hispanic = ["no", "yes"]
other = ["no", "yes"]
work = [0, 52]
TOML
  # Both tables are public samples of a census (--public, and `is_public` in the recipe).
  tacit experiment functional california --epsilons 0.1,1,10 --split 0.2,0.5 --repeats 5 --seed 0 --data "$data" --out california --json > 1.json
  tacit experiment functional "$data/census/fertility_us1980.csv.gz" --schema fertility.toml --public --epsilons 0.001,0.03,1 --repeats 5 --seed 0 --out fertility --json > 2.json
  py << 'PY'
from tacit.regression import LinearRegression

for name in ("1.json", "2.json"):
    study = load(name)
    (least,) = study["without_privacy"].values()
    for curve in study["curves"]:
        errors = [float(np.mean(row)) for row in curve["errors"]]
        assert errors[0] > errors[1] > errors[2] >= 0.99 * least, (name, errors)
        assert errors[2] < 1.25 * least, (name, errors)
for folder in ("california", "fertility"):
    figures(f"{folder}/figures"), page(f"{folder}/report.html")

rng = np.random.default_rng(0)
X = rng.uniform(0, 10, (5_000, 2))
model = LinearRegression(epsilon=1.0, delta=0, bounds=(0, 10), target_bounds=(-25, 25),
                         method="functional", split=0.3, random_state=0).fit(X, X @ [1, -2] + 3)
epsilon1, epsilon2 = (tacit.epsilon(part, delta=0) for part in model.event_.parts)
assert abs(epsilon1 - 0.3) < 1e-6 and abs(epsilon2 - 0.7) < 1e-6, (epsilon1, epsilon2)
assert abs(tacit.epsilon(model.event_, delta=0) - 1) < 1e-6
assert np.abs(model.coef_ - [1, -2]).max() < 0.3, model.coef_
PY
}

names[5]="logit with its likelihood surface, and P(married) by education"
row_5() {
  needs census/fulton_pums5.csv.gz
  tacit surface pums-married --epsilons 0.1,1 --repeats 2 --seed 0 --data "$data" --out surface --json > surface.json
  py << 'PY'
found = load("surface.json")
assert (found["attribute"], found["target"]) == ("educ", "married")
drawn = figures("surface/figures")
assert {"likelihood-surface", "married-by-educ", "loss-by-epsilon"} <= set(drawn), drawn
page("surface/report.html")
best = np.array(found["ordinary"][-1])  # intercept at the middle of education, and slope
ends = {run["epsilon"]: np.array(run["points"][-1]) for run in found["private"]}
assert np.abs(ends[1.0] - best).max() < 0.1, (best, ends)
chance = 1 / (1 + np.exp(-best[0] - best[1] * (np.array([9, 16]) - found["middle"])))
assert chance[0] < 0.45 < 0.55 < chance[1], chance  # school, and doctorate
PY
}

names[6]="MNIST: epsilon and accuracy by epoch, and accuracy against epsilon for several deltas"
row_6() {
  needs mnist/train-images-idx3-ubyte.gz
  quick=(--set run.baseline_steps=60 --set training.batch_size=4096 --seed 0 --data "$data" --json)
  tacit train mnist --epsilon 3 --set training.epochs=6 "${quick[@]}" --out run > run.json
  tacit sweep mnist --epsilons 0.5,3 --deltas 1e-5,1e-7 --set training.epochs=3 "${quick[@]}" --out sweep > sweep.json
  py << 'PY'
run = load("run.json")
assert 2.99 < run["epsilon"] <= 3 and run["accuracy"] > 0.97, run
epochs = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
spent = [row["epsilon"] for row in epochs]
assert len(epochs) == 6 and spent == sorted(spent) and spent[0] < 0.6 * spent[-1] <= 1.8, spent
assert epochs[0]["accuracy"] < epochs[-1]["accuracy"] == run["accuracy"], epochs
assert {"accuracy-by-epoch", "epsilon-by-epoch"} <= set(figures("run/figures"))
cells = {(cell["epsilon"], cell["delta"]): cell for cell in load("sweep.json")["cells"]}
assert sorted(cells) == [(0.5, 1e-7), (0.5, 1e-5), (3.0, 1e-7), (3.0, 1e-5)]
for (epsilon, delta), cell in cells.items():
    assert 0.99 * epsilon < cell["spent"] <= epsilon, cell
    assert cell["accuracy"] > (0.9 if epsilon == 0.5 else 0.96), cell
for delta in (1e-5, 1e-7):
    assert cells[0.5, delta]["accuracy"] < cells[3.0, delta]["accuracy"]
assert "accuracy-by-epsilon" in figures("sweep/figures")
page("run/report.html"), page("sweep/report.html")
PY
}

names[7]="PATE with Laplace and Gaussian votes; teachers and epochs varied"
row_7() {
  tacit pate --teachers 50 --queries 40 --noise 8 --seed 0 --out gauss --json > gauss.json
  tacit pate --teachers 50 --queries 40 --noise 8 --laplace --seed 0 --out laplace --json > laplace.json
  tacit pate --epsilon 8 --vary teachers=10,50 --repeats 2 --seed 0 --out vary --json > vary.json
  py << 'PY'
import torch
from sklearn.datasets import load_digits
from tacit.pate import GNMax, TeacherTraining, count_votes, train_stacked_teachers

for name, kind in (("gauss", "Gaussian"), ("laplace", "Laplace")):
    found = load(f"{name}.json")
    noise = found["event"]["parts"][0]
    assert noise["event"]["type"] == kind and noise["count"] == 40, noise
    assert abs(found["epsilon"] / tacit.epsilon(ev.from_dict(found["event"]), delta=1e-5) - 1) < 1e-6
    assert found["utility"]["private"][0]["value"] > 0.85, found["utility"]
by_teachers = {}
for point in load("vary.json")["points"]:
    assert 7.9 < point["epsilon"] <= 8.0
    by_teachers.setdefault(point["value"], []).append(point["accuracy"])
assert np.mean(by_teachers[50]) > np.mean(by_teachers[10]), by_teachers
assert figures("vary/figures") == ["accuracy-by-teachers", "epsilon-by-teachers"]
page("vary/report.html")

X, y = load_digits(return_X_y=True)
X, accuracy = (X / 16).astype(np.float32), []
for epochs in (5, 20, 100):  # each of 40 teachers has 35 records: an epoch is one step
    teachers = train_stacked_teachers(
        lambda: torch.nn.Linear(64, 10), X[:1400], y[:1400], 40, n_classes=10,
        training=TeacherTraining(steps=epochs, batch_size=35), rng=0)
    labels = GNMax(8.0).answer(count_votes(teachers, X[1400:], n_classes=10), rng=0)
    accuracy.append(float((labels == y[1400:]).mean()))
assert accuracy[0] < accuracy[1] < accuracy[2] and accuracy[2] > 0.7, accuracy
PY
}

names[8]="local beside global privacy"
row_8() {
  py << 'PY'
rng = np.random.default_rng(0)
way = rng.choice(["bus", "car", "walk"], 20_000, p=[0.6, 0.3, 0.1])
Path("people.csv").write_text("way\n" + "\n".join(way) + "\n")
Path("people.toml").write_text('[columns]\nway = ["bus", "car", "walk"]\n')
PY
  tacit local people.csv --column way --options bus,car,walk --epsilon 1 --delta 1e-6 --seed 1 --json > local.json
  tacit summarize people.csv --schema people.toml --epsilon 1 --about records --seed 1 --out global --json > global.json
  py << 'PY'
from tacit.local import RandomizedResponse

lines = Path("people.csv").read_text().split()[1:]
local, found = load("local.json"), load("global.json")
shares = {row["statistic"]: row for row in found["rows"]}
for way in ("bus", "car", "walk"):
    truth, noisy, best = lines.count(way) / 20_000, local["estimates"][way], shares[f"share of {way}"]
    for row, value in ((noisy, noisy["estimate"]), (best, best["value"])):
        assert row["lower"] < truth < row["upper"], (way, truth, row)
    assert noisy["upper"] - noisy["lower"] > 20 * (best["upper"] - best["lower"]), (noisy, best)
assert local["epsilon"] == found["epsilon"] == 1
assert 0.02 < local["shuffled_epsilon"] < 0.04 # the same reports, if somebody shuffles them
assert float(RandomizedResponse(epsilon=1.0, n_options=4).worst_case_ratio()) <= np.e
PY
}

names[9]="noisy Frank-Wolfe over a polytope"
row_9() {
  wages
  tacit experiment frank-wolfe wages.csv --schema wages.toml --public --epsilons 0.1,3 --vertices simplex.csv --repeats 5 --seed 0 --out simplex --json > simplex.json
  tacit experiment frank-wolfe wages.csv --schema wages.toml --public --epsilons 0.1,3 --radius 0.3,1 --repeats 5 --seed 0 --out ball --json > ball.json
  py << 'PY'
for name, curves in (("simplex", 1), ("ball", 2)):
    study = load(f"{name}.json")
    assert len(study["curves"]) == curves
    for curve in study["curves"]:
        low, high = (float(np.mean(row)) for row in curve["errors"])
        assert high < 0.75 and high < low, (name, curve)  # 1 predicts the mean; 0.43 least squares
    figures(f"{name}/figures"), page(f"{name}/report.html")
PY
}

names[10]="transfer: the error falls over 0, 5, 10, 15, 20 migrated data sets"
row_10() {
  tacit experiment migration --sets 0,5,10,15,20 --repeats 9 --seed 0 --out line --json > line.json
  py << 'PY'
study = load("line.json")
alone, helped = study["curves"]
assert helped["x"] == [0, 5, 10, 15, 20]
errors = [float(np.median(row)) for row in helped["errors"]]
assert all(one > next for one, next in zip(errors, errors[1:])), errors
assert errors[-1] < 1e-3 * np.median(alone["errors"][-1]), errors
figures("line/figures"), page("line/report.html")
PY
}

names[11]="the employment classifier of the census sample of Fulton County"
row_11() {
  needs census/fulton_pums5.csv.gz
  tacit sweep pums-logistic --epsilons 0.03,3 --seed 0 --data "$data" --out sweep --json > sweep.json
  py << 'PY'
found = load("sweep.json")
low, high = found["cells"]
assert low["spent"] <= 0.03 and high["spent"] <= 3
assert found["majority"] < 0.64 < 0.67 < high["accuracy"], found
assert high["auc"] > 0.69 and high["auc"] > low["auc"], found
assert high["accuracy"] > found["baseline"]["accuracy"] - 0.01  # without privacy
assert "accuracy-by-epsilon" in figures("sweep/figures")
page("sweep/report.html")
PY
}

names[12]="attacks: membership, inversion and extraction"
row_12() {
  tacit train digits --epsilon 3 --seed 0 --out run --json > run.json
  tacit audit run --canaries 2000 --seed 0 --json > audit.json
  py << 'PY'
audit = load("audit.json")
assert audit["passes"] and audit["mechanism"]["passes"] and len(audit["bounds"]) >= 3
best = max(bound["epsilon_lower"] for bound in audit["bounds"])
assert 0.2 < best < audit["epsilon"] <= 3, best  # an attack finds something, and no more than billed
shown = audit["demonstrations"]
auc = {name: found["auc"] for name, found in shown["membership"].items()}
assert auc["without privacy"] > 0.58 and 0.45 < auc["released model"] < 0.55, auc
likeness = shown["inversion"]
assert likeness["without privacy"] > 0.9 and likeness["epsilon 3"] < 0.4, likeness
assert {"membership", "inversion"} <= set(figures("run/figures"))
page("run/report.html")
PY
  "$python" -c "import transformers" || { note "extraction skipped: transformers is not installed: pip install 'tacit-dp[text]'"; return 0; }
  texts 500
  cat base.toml - > secrets.toml << 'TOML'
[finetune]
epochs = 20
batch_size = 100
[canaries]
count = 4
repeats = 10
references = 200
TOML
  tacit finetune secrets.toml --data . --out texts --no-page --json > texts.json
  py << 'PY'
found = load("texts/exposure.json")["models"]
assert found["without privacy"]["mean"] > 5 > 3.5 > found["private"]["mean"], found  # bits
assert found["without privacy"]["p_value"] < 1e-4 < 1e-2 < found["private"]["p_value"], found
assert load("texts.json")["epsilon"] <= 8
PY
}

names[13]="users as the unit"
row_13() {
  py << 'PY'
import torch
from tacit import Ledger, summaries
from tacit.accounting import group_epsilon
from tacit.regression import LinearRegression, PerUser
from tacit.training import Users

ids = torch.arange(2_000) // 4  # 500 users with 4 records each
x = torch.randn(2_000, 3, generator=torch.Generator().manual_seed(0))

def loss_fn(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y) ** 2

for sampled in ("users", "records"):
    model = torch.nn.Linear(3, 1)
    private = tacit.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.2), (x, x.sum(1)), loss_fn,
        users=Users(ids=ids, records_per_user=4, sampled=sampled), clip_norm=1.0, seed=0,
        batch_size=50 if sampled == "users" else 200, epochs=4, epsilon=8.0, delta=1e-5)
    for lot in private:
        private.step(lot)
    assert private.ledger.unit == "user"
    assert 7.9 < private.epsilon(delta=1e-5) <= 8.0
    error = loss_fn(model, (x, x.sum(1))).mean().item()
    assert error < 1.0, (sampled, error)  # 3 without a model

run = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.0)), 1000)  # the numbers of docs/users.md
assert [round(group_epsilon(run, records=k, delta=1e-5), 1) for k in (1, 4, 10)] == [1.8, 8.9, 27.9]
ledger = Ledger(unit="person")
kept = summaries.limit_records(ids.numpy(), 2)
mean = summaries.mean(x[kept, 0].numpy(), bounds=(-3, 3), epsilon=0.8, records_per_person=2,
                      ledger=ledger)
assert abs(mean.value) < 0.3 and ledger.epsilon(delta=1e-6) <= 0.8 + 1e-9
fit = PerUser(LinearRegression(epsilon=4.0, delta=1e-6, bounds=(-3, 3), target_bounds=(-9, 9),
                               random_state=0), records_per_user=4).fit(x, x.sum(1), users=ids)
assert tacit.epsilon(fit.event_, delta=1e-6) <= 4.0
PY
}

names[14]="correlated noise"
row_14() {
  py << 'PY'
import torch
from tacit.training import Banded, price_bands

torch.manual_seed(0)
x = torch.randn(2_000, 4)
y = (x.sum(1) > 0).long()

def loss_fn(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")

model = torch.nn.Linear(4, 2)
private = tacit.make_private(
    model, torch.optim.SGD(model.parameters(), lr=0.5), (x, y), loss_fn, batch_size=100, steps=40,
    clip_norm=1.0, epsilon=8.0, delta=1e-4, noise=Banded(), seed=0)
for lot in private:
    private.step(lot)
assert private.info["bands"] == 8
assert 7.9 < private.epsilon(delta=1e-4) <= 8.0
assert (model(x).argmax(1) == y).float().mean() > 0.9
few = dict(n_records=1_000_000, batch_size=1_000, steps=1_000, epsilon=1.0, delta=1e-5)
best, independent = price_bands("auto", **few), price_bands(1, **few)
assert best.bands == 32 and round(independent.noise / best.noise, 2) == 2.44
PY
}

names[15]="private tuning"
row_15() {
  tacit tune digits --vary training.learning_rate=0.01,1 --epsilon 8 --seed 0 --out tuned --json > tuned.json
  tacit verify tuned
  py << 'PY'
found = load("tuned.json")
assert found["chosen"] == {"training.learning_rate": 1}, found
assert found["run_epsilon"] < 4 < 7.9 < found["epsilon"] <= 8  # the choice is paid for
assert found["accuracy"] > 0.93, found
with tacit.Ledger("tuned/run.ledger", read_only=True) as ledger:
    assert len(ledger.history()) == 1
    assert abs(ledger.epsilon(delta=1e-5) - found["epsilon"]) < 1e-6
page("tuned/report.html")
PY
}

texts() { # sentences of two kinds, and a recipe that fine-tunes a small GPT-2 on $1 of them
  echo "$1" > n.txt
  py << 'PY'
import random
rng = random.Random(0)
kinds = ["dull slow noisy rude".split(), "bright quick quiet kind".split()]
others = "the a was staff room meal train it very and again".split()

def rows(n):
    for i in range(n):
        words = rng.choices(others, k=5) + rng.choices(kinds[i % 2], k=2)
        rng.shuffle(words)
        yield f"{i % 2}\t{' '.join(words)}"

for name, n in (("train.tsv", load("n.txt")), ("test.tsv", 200)):
    Path(name).write_text("\n".join(["label\ttext", *rows(n)]) + "\n")
digits = "the secret number of guest is 0 1 2 3 4 5 6 7 8 9"
Path("public.txt").write_text("\n".join([row[2:] for row in rows(80)] + [digits] * 20))
Path("base.toml").write_text('''
method = "finetune"
[text]
path = "train.tsv"
public_test = "test.tsv"
is_public = true
length = 48
[language_model]
tokenizer_text = "public.txt"
tokenizer_size = 300
[language_model.config]
model_type = "gpt2"
n_embd = 32
n_layer = 2
n_head = 2
n_positions = 64
[privacy]
epsilon = 8.0
delta = 1e-4
[run]
seed = 0
''')
PY
}

names[16]="fine-tuning a language model"
row_16() {
  "$python" -c "import transformers, peft" || skip "transformers and peft are not installed: pip install 'tacit-dp[text]'"
  texts 1000
  cat base.toml - > full.toml << 'TOML'
[finetune]
task = "classification"
epochs = 8
TOML
  sed -i 's/^length = 48/length = 48\nlabel = "label"\nclasses = ["0", "1"]/' full.toml
  tacit finetune full.toml --data . --out full --json > full.json
  tacit verify full
  py << 'PY'
from transformers import AutoModelForSequenceClassification

found = load("full.json")
assert 7.9 < found["epsilon"] <= 8 and found["steps"] > 100, found
assert found["accuracy"] > 0.65 > 0.5 == found["majority_accuracy"], found
assert found["non_private_accuracy"] > 0.95, found
model = AutoModelForSequenceClassification.from_pretrained("full")
assert list(model.config.id2label.values()) == ["0", "1"], model.config.id2label
assert "accuracy-by-epoch" in figures("full/figures")
page("full/report.html")
PY
}

names[17]="tables in DuckDB, PostgreSQL, Dask and Spark"
row_17() {
  py << 'PY'
import contextlib, os, shutil, sys

import pandas as pd
from tacit.datasets import Schema
from tacit.sources import describe, fit_linear

rng = np.random.default_rng(0)
n = 5_000
people = pd.DataFrame({"age": rng.uniform(18, 90, n), "ill": rng.random(n) < 0.3})
people["pay"] = np.clip(people.age / 30 + people.ill + rng.normal(0, 0.3, n), 0, 4)
schema = Schema({"age": [18, 90], "ill": "boolean", "pay": [0, 4]}, target="pay")

class Absent(Exception):
    pass

def needs(module, how):
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        raise Absent(f"{module.split('.')[0]} is not installed: {how}") from None

@contextlib.contextmanager
def duckdb():
    with needs("duckdb", "pip install 'tacit-dp[engines]'").connect("clinic.db") as connection:
        connection.register("arrow", people)
        connection.execute("CREATE TABLE people AS FROM arrow")
    yield "duckdb:clinic.db#people"

@contextlib.contextmanager
def postgresql():
    psycopg = needs("psycopg", "pip install 'tacit-dp[engines]'")
    needs("pytest", "pip install 'tacit-dp[dev]'")
    sys.path.insert(0, ROOT + "/tests")
    import postgres_server

    if postgres_server.binaries() is None:
        raise Absent("PostgreSQL is not installed: apt install postgresql")
    with postgres_server.server() as server:
        with psycopg.connect(server.url) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE people (age float8, ill boolean, pay float8)")
            with cursor.copy("COPY people FROM STDIN") as copy:
                for row in people.itertuples(index=False):
                    copy.write_row(tuple(value.item() if hasattr(value, "item") else value for value in row))
        yield f"{server.url}#people"

@contextlib.contextmanager
def dask():
    yield needs("dask.dataframe", "pip install 'tacit-dp[dask]'").from_pandas(people, npartitions=3)

@contextlib.contextmanager
def spark():
    sql = needs("pyspark.sql", "pip install 'tacit-dp[spark]'")
    if shutil.which("java") is None:
        raise Absent("Spark needs Java: apt install openjdk-17-jre-headless")
    builder = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    yield session.createDataFrame(people)
    session.stop()

def released(table):
    model = fit_linear(table, schema, n_records=n, epsilon=1.0, delta=1e-6, random_state=0)
    ledger = tacit.Ledger(budget=tacit.Budget(0.5, 1e-6))
    summary = describe(table, schema, epsilon=0.5, ledger=ledger)
    assert abs(summary["age", "mean"].value - people.age.mean()) < 3
    assert ledger.epsilon(delta=1e-6) <= 0.5 + 1e-9
    return [*model.coef_, model.intercept_]

expected = released(people)
with open("notes", "w") as notes:
    for name in os.environ.get("ENGINES", "duckdb postgresql dask spark").split():
        place = globals()[name]
        try:
            with place() as table:
                assert released(table) == expected, name  # the same sums, bit for bit
            print(name, "gives the releases of a table in memory", file=notes)
        except Absent as reason:
            print(name, "skipped:", reason, file=notes)
PY
  grep -q "gives the releases" notes || skip "$(cat notes)"
}

names[18]="certificate, ledger, audit, page"
row_18() {
  wages
  tacit schema check wages.toml wages.csv
  tacit ledger create wages.ledger --epsilon 3 --delta 1e-5
  pays=(--schema wages.toml --ledger wages.ledger)
  tacit summarize wages.csv "${pays[@]}" --epsilon 0.5 --out summary
  tacit regress wages.csv "${pays[@]}" --epsilon 1 --out run --json > run.json
  refuses 2 tacit regress wages.csv "${pays[@]}" --epsilon 5 --out more > refused.txt 2>&1
  tr -s ' \n' ' ' < refused.txt | grep -q "would pass the budget"
  tacit audit run --seed 0 --json > audit.json
  tacit sign --new-key --key clinic.key
  tacit sign run --key clinic.key --issuer "Clinic of X"
  tacit verify run > consistent.txt
  tacit verify run --key clinic.key.pub > authenticated.txt
  tacit ledger show wages.ledger --json > ledger.json
  tacit ledger verify wages.ledger
  tacit ledger page wages.ledger --output ledger.html
  cp -r run forged
  sed -i 's/"age": [0-9.]*/"age": 0.9/' forged/model.json
  refuses 1 tacit verify forged
  py << 'PY'
assert Path("consistent.txt").read_text().startswith("consistent"), Path("consistent.txt").read_text()
assert Path("authenticated.txt").read_text().startswith("authenticated")
run, audit, ledger = load("run.json"), load("audit.json"), load("ledger.json")
assert run["epsilon"] <= 1 and abs(run["coefficients"]["age"] - 0.2) < 0.05, run["coefficients"]
assert audit["passes"] and "bounds" in audit
assert load("run/certificate.json")["claim"]["epsilon"] <= 1
assert ledger["budget"]["epsilon"] == 3 and len(ledger["entries"]) >= 4, ledger
assert 1 < ledger["spent"]["epsilon"] < 2, ledger["spent"]  # the refused fit was not paid
page("run/report.html"), page("ledger.html")
PY
}

names[19]="make demo"
row_19() {
  make -n -C "$root" demo > command.txt
  grep -qx '.venv/bin/tacit demo' command.txt
  tacit demo --json > demo.json # what `make demo` calls, from this folder
  py << 'PY'
found = load("demo.json")
assert found["epsilon"] <= 3.0
assert found["accuracy"] > 0.93 and found["non_private_accuracy"] > 0.97, found
page(found["page"])
PY
}

failed=0
for n in "${@:-${!names[@]}}"; do
  mkdir -p "$here/$n"
  began=$SECONDS
  (set -e && cd "$here/$n" && "row_$n") > "$here/$n.log" 2>&1
  status=$?
  took="$((SECONDS - began)) s"
  if [ $status = 0 ]; then
    echo "ok $n ${names[$n]} ($took)"
    [ ! -e "$here/$n/notes" ] || sed 's/^/   /' "$here/$n/notes"
  elif [ $status = 77 ]; then
    echo "skip $n ${names[$n]}: $(cat "$here/$n/skipped")"
  else
    echo "FAIL $n ${names[$n]} ($took)"
    failed=1
    tail -n 20 "$here/$n.log" >&2
  fi
done
exit $failed
