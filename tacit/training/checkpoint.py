"""Restarts: every process of a run has its own key, and pays for its steps (`payments`).

A checkpoint holds the position of the run and what was paid, and no key: a process that continues a
run draws other lots and other noise. So no two sums ever share noise, whatever was changed
meanwhile. Steps after the checkpoint are lost and taken again, out of the reserve of the plan.
docs/guarantees.md has the proof, also for correlated noise.

A checkpoint is as private as the records: it holds weights that no one may have seen yet.
"""

from typing import TYPE_CHECKING, Any

from tacit._check import one_of
from tacit.training.checkpoint_file import CHOICES, CheckpointWriter, State
from tacit.training.distributed import is_sharded
from tacit.training.key import Key

if TYPE_CHECKING:
    from tacit.training.private import Private


def saved_state(run: "Private") -> State:
    """Return position and payments of a run, without its key."""
    if run._position.is_replay:
        raise ValueError("a replay cannot be saved: nothing that it computes may be continued.")
    return {
        **run._bill.state(),
        "is_reproducible": run.is_reproducible,
        "steps_taken": run.steps_taken,
        "end": run.steps,
        "clip_moves": list(run._position.clip_moves),
        "mean": run._mean and run._mean.state(),
        "salt": run._salt.secret.hex(),
    }


def load_saved_state(run: "Private", state: State, lost_steps: str | None) -> None:
    """Continue a run from `saved_state`, with a key of its own: no noise is used twice."""
    given = "reserve" if run._checkpoint is None else run._checkpoint.lost_steps
    chosen = lost_steps or given
    one_of(CHOICES, lost_steps=chosen)
    _require_same_plan(run, state)
    run._ranks.require_equal("the checkpoint", [state["run"], state["steps_taken"]])
    run._turns.begin(run)  # lots that were handed out came from another key
    run._salt = Key(bytes.fromhex(state["salt"]))
    run.is_reproducible |= state["is_reproducible"]
    at, taken = run._position, state["steps_taken"]
    at.steps_taken = at.first_step = taken
    at.clip_moves, at.kept = tuple(state["clip_moves"]), None
    run._bill.begin_at(taken, state["run"])
    if run._mean is not None:
        run._mean.load_state(state["mean"])
    run._noise.start_anew(taken)
    _use(run, run._ranks.share(Key.fresh()))  # so a refusal leaves no key that was used before
    of_run = {"taken": taken, "end": state["end"], "is_seeded": run._seeded is not None}
    resumed = run._ranks.on_first(lambda: run._bill.resume(state, chosen, **of_run))
    at.end, run._bill.repaid, attempt = resumed
    own = Key.fresh() if run._seeded is None else run._seeded.of_attempt(attempt)
    _use(run, run._ranks.share(own))


def _require_same_plan(run: "Private", state: State) -> None:
    """Raise `ValueError` unless what was paid for the saved run pays for this one."""
    first = (state.get("mean") or {}).get("first")
    is_same = state.get("event") == run._plan.training_event.to_dict()
    if not is_same or first != (run._mean and run._mean.first):
        raise ValueError(
            "the checkpoint is of a run with another plan: sampling, noise, steps, reserve and "
            "average have to be those that were paid for. Give the same ones, or begin a new "
            "run without the checkpoint."
        )
    if (state["unit"] == "record") != (run.ledger.unit == "record"):
        raise ValueError(
            f"the checkpoint is of a run that counts the privacy of one {state['unit']}, but "
            f"this run counts that of one {run.ledger.unit}. Give the same users= and a "
            "ledger of the same unit."
        )


def replay_state(run: "Private") -> State:
    """Return the state of a run with its key, for the audit of a finished run alone.

    It is the one exception to the rule that a key ends with its process: with it
    `tacit.experiments.replay_run` computes steps again. Whoever has it can subtract the noise.
    """
    return {
        "key": run._lots.key.secret.hex(),
        "steps_taken": run.steps_taken,
        "clip_moves": list(run._position.clip_moves),
        "microbatch": run._lots.limit,
        "noise": run._noise.state(),
        "mean": run._mean and run._mean.state(),
    }


def load_replay(run: "Private", state: State) -> None:
    """Compute the steps after a `replay_state` again; nothing of them may be released."""
    at = run._position
    at.is_replay = True
    at.steps_taken = at.first_step = state["steps_taken"]
    at.clip_moves, run._lots.limit = tuple(state["clip_moves"]), state["microbatch"]
    if run._lots.padding is not None:
        run._lots.padding = run._lots.padding.within(state["microbatch"])
    if run._mean is not None:
        run._mean.load_state(state["mean"])
    run._noise.load_state(state["noise"])
    _use(run, Key(bytes.fromhex(state["key"])))


def _use(run: "Private", key: Key) -> None:
    run._lots.use(key)
    run._noise.use(key)


# The file -----------------------------------------------------------------------------------------


def open_checkpoint(run: "Private") -> None:
    """Continue from the file of the checkpoint, if there is one; else from the beginning."""
    if run._checkpoint is None or run._checkpoint.path is None:
        return
    if is_sharded(run._model):
        raise ValueError(
            "checkpoint.path is for a model that one process holds whole. Leave it out, and "
            "save private.state_dict() with the shards in your loop."
        )
    writer = CheckpointWriter(run._checkpoint.path)
    state = run._ranks.on_first(writer.read)
    if state is None and run._ranks.rank == 0 and not run.ledger.is_durable:
        raise ValueError(
            "a checkpoint needs a ledger that outlasts the process, which knows how many steps "
            "were taken: give ledger=tacit.Ledger(FILE)."
        )
    run._bill.writer = writer if run._ranks.rank == 0 else None
    if state is not None:
        for name, part in _saved_parts(run).items():
            part.load_state_dict(state[name])


def keep(run: "Private", *, now: bool = False) -> None:
    """Begin to write a checkpoint, if one is due; with `now`, or after the last step, write it."""
    writer, at = run._bill.writer, run._position
    if writer is None:
        return
    is_over = at.steps_taken == at.end
    is_due = is_over or (at.steps_taken - run._bill.begin) % run._plan.kept_every == 0
    if now or (is_due and at.kept != at.steps_taken):
        at.kept = at.steps_taken
        parts = _saved_parts(run)
        writer.write({name: part.state_dict() for name, part in parts.items()})
        if now or is_over:
            writer.wait()


def _saved_parts(run: "Private") -> dict[str, Any]:  # Any: with state_dict and load_state_dict
    own = {"model": run._model, "optimizer": run._optimizer, "private": run}
    return own | dict({} if run._checkpoint is None else run._checkpoint.also)
