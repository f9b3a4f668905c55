"""Options of `make_private` that go together: its noise, what it reports, and its speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tacit._check import boolean, one_of, whole
from tacit.training.banded_noise import Banded
from tacit.training.callbacks import Callback
from tacit.training.noisy_loss import NoisyLoss
from tacit.training.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How the noise of a run is made: `make_private(..., noise=Noise(...))`.

    Parameters
    ----------
    schedule
        Factors on the noise multiplier by step: `Stairs`, `Ramp`, or a function of (step, steps).
        With epsilon, the noise is scaled so that the whole schedule costs that much.
    correlated
        `Banded(...)` for noise that partly cancels over time. `noise=Banded(...)` is short for
        `noise=Noise(correlated=Banded(...))`.
    secure
        Insist on a cryptographic generator. On a CPU the default is cryptographic too, if the
        package `cryptography` is installed; `private.generator` names the generator in use.
    arithmetic
        "bounded": sums over examples are computed such that one example moves them by at most
        clip_norm * (1 + eta), rounding included, with a proved eta, and the noise is multiplied by
        1 + eta. "fast": sums are as fast as they can be, and their rounding need not be bounded.
        `private.arithmetic` states what is proved. See docs/arithmetic.md.
    """

    schedule: Schedule | None = None
    correlated: Banded | None = None
    secure: bool = False
    arithmetic: Literal["fast", "bounded"] = "fast"

    def __post_init__(self) -> None:
        if self.correlated is not None and not isinstance(self.correlated, Banded):
            raise TypeError(
                "noise must be tacit.training.Noise(...), Banded(...) or None, got "
                f"{type(self.correlated).__name__}."
            )
        boolean(secure=self.secure)
        one_of(("fast", "bounded"), arithmetic=self.arithmetic)

    @classmethod
    def of(cls, given: "Noise | Banded | None") -> "Noise":
        """Return the settings that the option `noise` of `make_private` asks for."""
        return given if isinstance(given, Noise) else cls(correlated=given)


@dataclass(frozen=True, kw_only=True)
class Reports:
    """What a run says beside its model: `make_private(..., reports=Reports(...))`.

    Parameters
    ----------
    noisy_loss
        `NoisyLoss(upper=...)`: release the mean training loss of each step too, with noise. It is
        paid by more noise on the gradient, so no price changes. See docs/callbacks.md.
    callbacks
        Functions that are called after each step with a `ReleasedStep`, the record of what the run
        has released so far; on rank 0 alone. `TensorBoard`, `MLflow`, `WandB` and `RichProgress`
        are such functions.
    errors_in_full
        Show errors of the data set, `collate_fn`, `augment`, the model and `loss_fn` in full, for
        debugging: their text may quote private records. By default a `ProgramError` names the kind
        of error and the line of code, and withholds the text.
    """

    noisy_loss: NoisyLoss | None = None
    callbacks: Sequence[Callback] = ()
    errors_in_full: bool = False

    def __post_init__(self) -> None:
        if self.noisy_loss is not None and not isinstance(self.noisy_loss, NoisyLoss):
            raise TypeError(
                "noisy_loss must be tacit.training.NoisyLoss(upper=...) or None, got "
                f"{type(self.noisy_loss).__name__}."
            )
        if callable(self.callbacks) or not all(map(callable, self.callbacks)):
            raise TypeError(
                "callbacks must be a list of functions of one tacit.training.ReleasedStep."
            )
        object.__setattr__(self, "callbacks", tuple(self.callbacks))
        boolean(errors_in_full=self.errors_in_full)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Options of a run that change its speed and not its guarantee: `make_private(..., speed=)`.

    Parameters
    ----------
    max_microbatch
        Most rows on the device at once. By default it follows from the memory that is available,
        and it is halved whenever memory runs out.
    num_workers
        Processes that fetch records ahead.
    compile
        Compile the clipped sum of `private.step` and `private.backward()`, and replay it as a CUDA
        graph on a GPU. Microbatches are padded to a multiple of some rows. The first step takes
        tens of seconds; later steps are faster than uncompiled ones. "auto" compiles on a GPU if
        the run has so many steps that it pays, says so before the first step, and runs the program
        as it is if it cannot be compiled. It never compiles on a CPU. See docs/speed.md.
    check
        Compare the program with `loss_fn` on synthetic records before anything is paid
        (`tacit.training.program.comparison`). A program that combines examples is refused then.
        Without the comparison it is private too, but means something else than its author thought.
    """

    max_microbatch: int | None = None
    num_workers: int = 0
    compile: bool | Literal["auto"] = "auto"
    check: bool = True

    def __post_init__(self) -> None:
        if self.max_microbatch is not None:
            whole(max_microbatch=self.max_microbatch, least=1)
        whole(num_workers=self.num_workers)
        one_of((True, False, "auto"), compile=self.compile)
        boolean(check=self.check)
