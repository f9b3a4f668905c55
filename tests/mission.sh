#!/usr/bin/env bash
# One command, or a few lines of Python with public names, for each row of the mission, in the order
# of the clauses of the design's paragraph "The mission's rows". Each asserts its result.
#
#   bash tests/mission.sh          all rows: prints `ok N name`, `skip N name: why` or `FAIL N name`
#   bash tests/mission.sh 7 9      some rows
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
    assert "</html>" in Path(name).read_text() and len(Path(name).read_text()) > 20_000, name

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

wages() { # tables and schemas: people, their wages, and whether these are high
  py << 'PY'
rng, n = np.random.default_rng(0), 6_000
age, schooling = rng.integers(18, 66, n), rng.integers(8, 19, n)
region = rng.choice(["north", "south", "west"], n, p=[0.5, 0.3, 0.2])
wage = np.clip(5 + 0.2 * age + 1.1 * schooling + rng.normal(0, 4, n), 0, 60)
rows = [f"{a},{s},{r},{w:.2f},{int(w > 27)}" for a, s, r, w in zip(age, schooling, region, wage)]
Path("wages.csv").write_text("\n".join(["age,schooling,region,wage,high", *rows]) + "\n")
columns = "[columns]\nage = [18, 65]\nschooling = [8, 18]\n"
Path("wages.toml").write_text(f'target = "wage"\n{columns}wage = [0, 60]\n')
Path("high.toml").write_text(f'target = "high"\n{columns}high = ["0", "1"]\n')
np.savetxt("simplex.csv", [[0, 0], [0.8, 0], [0, 0.8]], delimiter=",")
PY
}

names[1]="DP-SGD by lots and batches, with flat, per-layer and scheduled clipping"
row_1() {
  py << 'PY'
import torch
from torch.nn import functional as F
from tacit.training import Linear, PerLayer

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
        for inputs, labels in private.batches():
            private.backward(F.cross_entropy(model(inputs), labels, reduction="none"))
            optimizer.step()
    assert private.steps_taken == private.steps == 50
    assert 1.99 < private.epsilon(delta=1e-5) <= 2.0
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    assert accuracy > 0.9, accuracy
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), private

lots, plan = trained()
batches, _ = trained(by="batches", max_microbatch=64)  # a lot in parts is the same lot
assert torch.allclose(lots, batches, atol=1e-4), (lots - batches).abs().max()
per_layer, _ = trained(lambda model: PerLayer.split(model, 1.0))
scheduled, other = trained(clip_schedule=Linear(1.0, 0.5))
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
epsilon1, epsilon2 = (tacit.epsilon(part, delta=0) for part in model.event_.events)
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
  tacit train mnist --epsilon 3 --set training.epochs=8 --seed 0 --data "$data" --out run --json > run.json
  tacit sweep mnist --epsilons 0.5,3 --deltas 1e-5,1e-7 --set training.epochs=4 --seed 0 --data "$data" --out sweep --json > sweep.json
  py << 'PY'
PY
}

names[7]="PATE with Laplace and Gaussian votes; teachers and epochs varied"
row_7() {
  tacit pate --teachers 50 --queries 40 --noise 8 --seed 0 --out gauss --json > gauss.json
  tacit pate --teachers 50 --queries 40 --noise 8 --laplace --seed 0 --out laplace --json > laplace.json
  tacit pate --epsilon 8 --vary teachers=10,50 --repeats 3 --seed 0 --out vary --json > vary.json
  py << 'PY'
import torch
from sklearn.datasets import load_digits
from tacit.pate import GNMax, TorchTeacher, count_votes, train_stacked_teachers
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
PY
}

names[9]="noisy Frank-Wolfe over a polytope"
row_9() {
  wages
  tacit experiment frank-wolfe wages.csv --schema wages.toml --public --epsilons 0.1,3 --vertices simplex.csv --repeats 5 --seed 0 --out simplex --json > simplex.json
  tacit experiment frank-wolfe wages.csv --schema wages.toml --public --epsilons 0.1,3 --radius 0.3,1 --repeats 5 --seed 0 --out ball --json > ball.json
  py << 'PY'
for name in ("simplex", "ball"):
    study = load(f"{name}.json")
    for curve in study["curves"]:
        low, high = (float(np.mean(row)) for row in curve["errors"])
        print(name, curve["name"], low, high, study["without_privacy"])
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
  tacit sweep pums-logistic --epsilons 0.1,3 --seed 0 --data "$data" --out sweep --json > sweep.json
  py << 'PY'
PY
}

names[12]="attacks: membership, inversion and extraction"
row_12() {
  tacit train digits --epsilon 3 --seed 0 --out run --json > run.json
  tacit audit run --canaries 2000 --seed 0 --json > audit.json
  py << 'PY'
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
from tacit.training import Banded, choose_bands, price_bands

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
best, independent = choose_bands(**few), price_bands(1, **few)
assert best.bands == 32 and round(independent.noise / best.noise, 2) == 2.44
PY
}

names[15]="private tuning"
row_15() {
  tacit tune digits --vary training.learning_rate=0.01,1 --epsilon 8 --set training.epochs=10 --seed 0 --out tuned --json > tuned.json
  tacit verify tuned
  py << 'PY'
PY
}

texts() { # sentences of two kinds, and a recipe that fine-tunes a small GPT-2 on them
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

for name, n in (("train.tsv", 1_000), ("test.tsv", 200)):
    Path(name).write_text("\n".join(["label\ttext", *rows(n)]) + "\n")
digits = "the secret number of guest is 0 1 2 3 4 5 6 7 8 9"
Path("public.txt").write_text("\n".join([row[2:] for row in rows(80)] + [digits] * 20))
Path("base.toml").write_text('''
method = "finetune"
[text]
path = "train.tsv"
public_test = "test.tsv"
is_public = true
length = 40
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
  texts
  py << 'PY'
PY
}

names[17]="tables in DuckDB, PostgreSQL, Dask and Spark"
row_17() {
  py << 'PY'
PY
}

names[18]="certificate, ledger, audit, page"
row_18() {
  wages
  tacit schema check wages.toml wages.csv
  tacit ledger create wages.ledger --epsilon 3 --delta 1e-5
  tacit summarize wages.csv --schema wages.toml --epsilon 0.5 --ledger wages.ledger --out summary
  tacit regress wages.csv --schema wages.toml --epsilon 1 --ledger wages.ledger --out run --json > run.json
  refuses 2 tacit regress wages.csv --schema wages.toml --epsilon 2 --ledger wages.ledger --out more
  tacit audit run --seed 0 --json > audit.json
  tacit sign --help > /dev/null
  tacit report run
  tacit verify run
  py << 'PY'
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
