"""Options of a private run that change its speed and not its guarantee."""

from dataclasses import dataclass
from typing import Literal

from tacit._check import one_of, whole


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Options of `make_private` that change the speed of a run and not its guarantee.

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
    """

    max_microbatch: int | None = None
    num_workers: int = 0
    compile: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.max_microbatch is not None:
            whole(max_microbatch=self.max_microbatch, least=1)
        whole(num_workers=self.num_workers)
        one_of((True, False, "auto"), compile=self.compile)
