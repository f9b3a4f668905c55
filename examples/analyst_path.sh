#!/usr/bin/env bash
# The whole path of an analyst on three tables: declare, budget, summarize, train, regress, audit,
# predict, report and verify. Needs the folder of the data sets:
#
#   examples/analyst_path.sh DATA [WORK]
#
# DATA holds census/fulton_pums5.csv.gz, census/cps_earnings_cpssw8.csv.gz and adult/adult.data.gz.
# Schemas are written from the codebooks of the tables, not from their values.
set -euo pipefail
data=$(realpath "$1")
work=${2:-$(mktemp -d)}
tacit=${TACIT:-tacit}
mkdir -p "$work"
cd "$work"

schema_pums() {
  cat <<'TOML'
target = "employed"
[columns]
age = [18, 93]
educ = [1, 16]
income = [-10000, 200000]
sex = "boolean"
married = "boolean"
latino = "boolean"
black = "boolean"
asian = "boolean"
disability = "boolean"
employed = "boolean"
TOML
}

schema_cps() {
  cat <<'TOML'
target = "earnings"
[columns]
age = [16, 85]
education = [0, 20]
gender = ["male", "female"]
region = ["Northeast", "Midwest", "South", "West"]
earnings = [0, 60]
TOML
}

schema_adult() {
  cat <<'TOML'
target = "c15"
[columns]
c1 = [17, 90]
c5 = [1, 16]
c6 = ["Never-married", "Married-civ-spouse", "Divorced", "Separated", "Widowed", "Married-spouse-absent", "Married-AF-spouse"]
c10 = ["Male", "Female"]
c11 = [0, 20000]
c13 = [1, 99]
c15 = ["<=50K", ">50K"]
[file]
header = false
TOML
}

play() { # name, file, verbs that learn
  name=$1 file=$2
  shift 2
  echo "== $name"
  flags=(); [ "$name" = adult ] && flags=(--no-header)
  "$tacit" schema init "$file" --out "$name.begun.toml" "${flags[@]}"
  "schema_$name" > "$name.toml"
  "$tacit" schema check "$name.toml" "$file"
  "$tacit" ledger create "$name.ledger" --epsilon 4 --delta 1e-5
  "$tacit" summarize "$file" --schema "$name.toml" --epsilon 0.5 --ledger "$name.ledger" --out "$name-summary"
  "$tacit" advise "$file" --schema "$name.toml" --epsilon 1
  for verb in "$@"; do
    run="$name-$verb"
    "$tacit" "$verb" "$file" --schema "$name.toml" --epsilon 1 --delta 1e-6 --ledger "$name.ledger" --out "$run"
    [ "$verb" = train ] && "$tacit" audit "$run" --canaries 1000
    "$tacit" predict "$run" "$file" --out "$run.csv"
    "$tacit" report "$run"
    "$tacit" verify "$run/certificate.json"
  done
  "$tacit" ledger verify "$name.ledger"
}

play pums "$data/census/fulton_pums5.csv.gz" train regress
play cps "$data/census/cps_earnings_cpssw8.csv.gz" regress
play adult "$data/adult/adult.data.gz" train regress
echo "all of it is in $work"
