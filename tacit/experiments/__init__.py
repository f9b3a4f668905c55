"""Experiments by recipe: data, features, model and budget in, a run folder out.

    from tacit.experiments.recipe import Recipe
    from tacit.experiments.released import load_model
    from tacit.experiments.train import train

    facts = train(Recipe.read("digits"), "runs/digits")
    facts.epsilon, facts.utility.mean
    load_model("runs/digits").predict(images)

Reading order: `recipe` and `settings` (what can be said), `train` and `session` (what is done),
`features` (what it costs before training), `run` (what is left behind), `sweep` (many runs).
"""
