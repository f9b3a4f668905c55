# %% [markdown]
# # MNIST
#
# The recipe that ships with tacit: scattering features (public, fixed), one linear layer, large
# lots. It needs the four files of MNIST in the folder named by `TACIT_DATA`; without them, the
# small digits of scikit-learn take their place.

# %%
import os
import tempfile
from pathlib import Path

from tacit.experiments import Recipe, train
from tacit.report import judge, write_page

data = os.environ.get("TACIT_DATA", "")
name = "mnist" if data and (Path(data) / "mnist").is_dir() else "digits"
recipe = Recipe.read(name).for_epsilon(1.0)
print(name, recipe.training)

# %%
folder = Path(tempfile.mkdtemp()) / name
result = train(recipe, folder)
print(f"epsilon {result.epsilon:.2f} at delta {result.delta:g}, {result.steps} steps")
print(
    f"accuracy {result.utility.private[0].value:.3f}, without privacy "
    f"{result.utility.non_private[0].value:.3f}"
)

# %% [markdown]
# The folder holds model, ledger and facts; the page explains them, the certificate can be checked.

# %%
write_page(folder)
print(sorted(path.name for path in folder.iterdir()))
print(judge(folder).word)
