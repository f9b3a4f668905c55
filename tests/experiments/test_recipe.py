"""Recipes: every default written out, every error says what to write."""

import tomllib

import pytest

from tacit.experiments.recipe import Recipe, shipped


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_recipe_reads_back_from_its_written_form(name):
    recipe = Recipe.read(name)
    assert recipe.name == name
    assert Recipe.parse(recipe.to_toml()) == recipe
    if recipe.method == "dp-sgd":  # the others have no settings that follow from the records
        filled = recipe.filled(50_000)
        assert Recipe.parse(filled.to_toml()) == filled == filled.filled(50_000)


def test_the_expected_recipes_are_shipped():
    wanted = {"digits", "mnist", "fashion-mnist", "paper-2016", "pums-logistic", "pums-mlp"}
    assert wanted <= set(shipped())


def test_a_filled_recipe_leaves_no_default_open():
    filled = Recipe().filled(1000)
    assert filled.training.batch_size == 125
    assert filled.privacy.delta == 1e-5
    assert filled.training.learning_rate_end == filled.training.learning_rate
    assert filled.training.decay_epochs == filled.training.epochs
    assert Recipe().filled(10**7).privacy.delta == 1e-8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nepoch = 3", r"\[training\] has no 'epoch'. Did you mean 'epochs'\?"),
        ("[trainin]\nepochs = 3", r"\[recipe\] has no 'trainin'. Did you mean 'training'\?"),
        ("[training]\nepochs = 'ten'", "training.epochs must be a number, got 'ten'"),
        ("[training]\nepochs = true", "training.epochs must be a number, got True"),
        ("[training]\nepochs = -1", "training.epochs must be a positive finite number, got -1"),
        ("[training]\nbatch_size = 0", "training.batch_size must be a whole number >= 1, got 0"),
        ("[training]\nmomentum = 1.0", r"training.momentum must be in \[0, 1\), got 1.0"),
        ("training = 3", r"\[training\] must be a table, got int"),
        ("[privacy]\ndelta = 2.0", r"privacy.delta must be in \[0, 1\), got 2.0"),
        ("[privacy]\nrelation = 'swap'", "privacy.relation must be one of add_remove"),
        ("[model]\nkind = 'conv'", "model.kind must be one of linear, mlp, cnn, module"),
        ("[model]\nkind = 'module'", 'model.module = "package.module:Name"'),
        ("[model]\nhidden = [0]", "model.hidden and model.channels must be a whole number >= 1"),
        ("[model]\nhidden = 1000", "model.hidden must be a list, got 1000"),
        ("[data]\nname = 'mnits'", "Did you mean 'mnist'"),
        ("[data]\nname = 'table'", "a table needs data.path"),
        ("[data]\nvalidation_share = 1.0", r"data.validation_share must be in \[0, 1\)"),
        ("[features]\nkind = 'pca'\nnoise_multiplier = 0", "features.noise_multiplier must be"),
        ("[[at]]\ntraining.epochs = 3", r"each \[\[at\]\] needs the epsilon it is for"),
        ("[[at]]\nepsilon = 1\ntraining.lr = 3", r"\[at.training\] has no 'lr'"),
        ("[[at]]\nepsilon = 1\nepochs = 3", "has epsilon, features and training, not 'epochs'"),
        ("[run]\nseed = -1", "run.seed must be a whole number >= 0"),
        ("epsilon = = 3", "the recipe is not TOML"),
    ],
)
def test_a_wrong_setting_says_what_to_write(text, message):
    with pytest.raises(ValueError, match=message):
        Recipe.parse(text)


def test_an_unknown_recipe_lists_those_that_are_shipped():
    with pytest.raises(ValueError, match=r"Shipped: .*digits"):
        Recipe.read("nonsense")


def test_settings_between_two_budgets_are_interpolated_on_logarithmic_axes():
    recipe = Recipe.parse(
        """
        [[at]]
        epsilon = 1
        training.epochs = 10
        training.batch_size = 100
        [[at]]
        epsilon = 4
        training.epochs = 40
        training.batch_size = 400
        training.optimizer = "adam"
        features.noise_multiplier = 2.0
        """
    )
    between = recipe.for_epsilon(2.0).training
    assert between.epochs == pytest.approx(20)
    assert between.batch_size == 200
    assert between.optimizer == "adam"
    assert recipe.for_epsilon(0.1).training.epochs == 10
    assert recipe.for_epsilon(100).training.epochs == 40
    assert recipe.for_epsilon(2.0).at == ()
    assert recipe.for_epsilon(2.0).features.noise_multiplier == 2.0


def test_a_setting_given_by_hand_holds_for_every_epsilon():
    digits = Recipe.read("digits")
    assert any("learning_rate" in given.get("training", {}) for given in digits.at)
    changed = digits.with_settings({"training.learning_rate": 0.123})
    assert {changed.for_epsilon(e).training.learning_rate for e in (0.5, 3.0)} == {0.123}
    assert digits.for_epsilon(3.0) != changed.for_epsilon(3.0)


def test_a_setting_is_changed_by_its_dotted_name():
    changed = Recipe().with_settings({"training.epochs": 5, "model.kind": "mlp", "name": "x"})
    assert (changed.training.epochs, changed.model.kind, changed.name) == (5.0, "mlp", "x")
    with pytest.raises(ValueError, match="has no 'epoch'"):
        Recipe().with_settings({"training.epoch": 5})
    with pytest.raises(ValueError, match=r"name\.x is not a setting"):
        Recipe().with_settings({"name.x": 5})


def test_any_text_and_number_reads_back_from_the_written_recipe():
    schema = {"target": "y", "columns": {"strange key!": {"categories": ["é", "\x7f"]}}}
    strange = {
        "name": 'a "quoted"\nline\\ with \x7f and é',
        "data.schema": schema,
        "training.learning_rate": 1.5e-300,
        "model.hidden": [],
        "model.arguments": {"truth": [True, False], "deep": {"whole": 3, "empty": []}},
        "at": [{"epsilon": 1, "training": {"epochs": 2}}, {"epsilon": 2}],
    }
    recipe = Recipe().with_settings(strange)
    assert Recipe.parse(recipe.to_toml()) == recipe
    assert tomllib.loads(recipe.to_toml())["data"]["schema"] == schema


def test_one_and_one_point_zero_are_the_same_recipe():
    recipe = Recipe.read("digits")
    whole, real = (recipe.for_epsilon(epsilon).to_toml() for epsilon in (1, 1.0))
    assert whole == real


# PATE ---------------------------------------------------------------------------------------------


def test_a_pate_recipe_has_its_own_sections_and_defaults():
    recipe = Recipe.parse('method = "pate"')
    assert recipe.privacy.epsilon is None, "answers do not stop at a budget unless one is given"
    assert recipe.privacy.delta == 1e-5
    assert Recipe.parse(recipe.to_toml()) == recipe
    assert "training" not in tomllib.loads(recipe.to_toml())
    assert "answers" not in tomllib.loads(Recipe().to_toml())
    with pytest.raises(ValueError, match=r'\[training\] cannot be used with method = "pate"'):
        recipe.with_settings({"training.epochs": 3})
    with pytest.raises(ValueError, match="method must be one of dp-sgd, pate"):
        Recipe.parse('method = "pat"')


def test_a_recipe_with_teachers_is_one_of_pate():
    recipe = Recipe.parse("[teachers]\ncount = 30\n[privacy]\ndelta = 1e-6\n")
    assert (recipe.method, recipe.privacy.delta) == ("pate", 1e-6)
    assert Recipe.parse(recipe.to_toml()) == recipe
    with pytest.raises(ValueError, match=r"\[recipe\] has no 'seed'"):
        Recipe.parse("seed = 7")


def test_the_number_of_jobs_does_not_make_another_recipe():
    recipe = Recipe(method="pate")
    assert recipe.with_settings({"teachers.jobs": 2}) == recipe
