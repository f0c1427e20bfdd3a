# %% [markdown]
# # Tutorial: half a network, without its data
#
# This page is a program, `examples/tutorial.py`, with what it printed; `examples/tutorial.ipynb`
# is the same as a notebook. It needs nothing but the
# package with its extras `demo` and `report`: a small network for 8×8 handwritten digits comes
# with it, and scikit-learn brings digits that the network was not trained on. Those are used
# for *measuring* only; nothing below learns from them.

# %%
import tempfile
from pathlib import Path

import torch

import lbyl
from lbyl.app import data
from lbyl.app.report import gather, write_report
from lbyl.app.sources import zoo

torch.manual_seed(0)
model = zoo.create("digits", weights="shipped")
info = zoo.info("digits")
example = torch.zeros(1, *info.input_shape)
digits = data.load("digits", "test")


def accuracy(network: torch.nn.Module) -> float:
    return data.evaluate(info, network, digits)


print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
print(f"{accuracy(model):.1f} % of {len(digits)} digits recognised")

# %% [markdown]
# ## What can be pruned
#
# `prepare` runs the network once on the example and follows every channel from the layer that
# makes it to the layers that consume it. A *unit* is a set of channels that can be pruned one by
# one. Unprunable layers are listed with the reason.

# %%
prepared = lbyl.prepare(model, example)
print(prepared.graph)

# %% [markdown]
# ## What it would cost
#
# `estimate` forecasts, without data, how much accuracy is kept: each point is a network that is
# cut, restored and compared with the original on inputs that nothing was fitted on.

# %%
print(prepared.estimate((0.3, 0.5)))

# %% [markdown]
# ## Prune half of the filters
#
# The statistics collected for the estimate serve every ratio, criterion and method. The model
# given is never changed. No criterion is named, so `echo` tries two and keeps the network whose
# answers stay closest to the original's on images that nothing was fitted on; the others prune
# the smallest filters.

# %%
for method in ("none", "neuron-merging", "lbyl", "echo"):
    result = prepared.compress(0.5, method=method)
    print(f"{method:<15} {accuracy(result.model):5.1f} %")

# %%
print(result)

# %% [markdown]
# ## A budget instead of a ratio
#
# With `Budget(macs=0.5)` layers lose unevenly. Several allocations of equal cost are cut and
# restored, and the one stays whose answers diverge least from the original's.

# %%
budget = prepared.compress(lbyl.Budget(macs=0.5), criterion="echo")
for row in budget.rows:
    print(f"{row.unit:<14} keeps {row.kept:>2} of {row.channels}")
print(f"{accuracy(budget.model):.1f} % at {budget.after.macs / budget.before.macs:.0%} of the MACs")
print("allocation:", budget.allocation)

# %% [markdown]
# ## Keep it, load it, show it
#
# `save` writes `model.safetensors` and `plan.json`; `load` gives a freshly built network of the
# original class the slim shapes and weights. The report is one HTML file.

# %%
with tempfile.TemporaryDirectory() as folder:
    lbyl.save(result, folder)
    again = lbyl.load(folder, model=zoo.create("digits"))
    same = torch.equal(again(example), result.model(example))
    page = write_report(
        result,
        Path(folder) / "report.html",
        accuracy={"original": accuracy(model), "slim": accuracy(result.model)},
        **gather(prepared, result),
    )
    print("the same outputs:", same)
    print(f"{page.name}: {page.stat().st_size / 1e3:.0f} kB")
