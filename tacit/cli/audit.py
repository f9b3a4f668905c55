"""`tacit audit RUN/`: attack a finished run; a lower bound above its bill proves a fault.

Exit codes: 0 no fault found; 1 a lower bound is above the bill, or a test refutes it; 2 an error.
"""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared


def audit(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    *,
    canaries: Annotated[int, typer.Option(min=2, help="Number of canaries.")] = 10_000,
    confidence: Annotated[
        float, typer.Option(help="Probability that a correct bill passes the audit.")
    ] = 0.95,
    data: shared.Root = None,
    seed: shared.Seed = None,
    trust_code: shared.TrustCode = None,
    page: shared.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Train the run's recipe again with canaries, attack every release, and write audit.json.

    A canary is an artificial example that is included or left out by a fair coin. The attack
    guesses which ones were included. The answers of a PATE run are attacked instead: the attack
    guesses whether one teacher's vote was changed. In all cases, a regression's included, the
    mechanism is tested too: noise, draws, sensitivity, keys and bill. An audit pays nothing. It
    changes the certificate, so audit first, then sign.

    Example: tacit audit runs/digits-epsilon-3
    """
    from tacit.experiments import RunFolder, audit_run
    from tacit.report import require_consistent

    require_consistent(RunFolder(folder))
    found = audit_run(
        folder,
        n_canaries=canaries,
        confidence=confidence,
        root=data,
        seed=seed,
        trust_code=trust_code or (),
    )
    if page:
        shared.write_page(folder)
    if as_json:
        shared.print_json(found.to_dict())
    else:
        claimed, attacked = shared.round_up(found.claimed), shared.round_up(found.epsilon)
        typer.echo(
            f"bill: epsilon {claimed} at delta {found.delta:g}; the attacked run: {attacked}"
        )
        for bound in found.bounds:
            typer.echo(f"at least {bound.epsilon_lower:.3f} by {bound.method} ({bound.assumes})")
        if (tested := found.mechanism) is not None:
            n = len(tested.findings)
            typer.echo(f"{n} tests of the mechanism, {len(tested.flagged)} of them show a fault")
            for finding in tested.flagged:
                typer.echo(f"fault in {finding.part}: {finding.name} (p {finding.p_value:.2g})")
            for what in tested.not_tested:
                typer.echo(f"not tested: {what}")
        if found.accuracy is not None:
            with_canaries, without = found.accuracy["with_canaries"], found.accuracy["without"]
            typer.echo(f"accuracy {with_canaries:.2%} with canaries, {without:.2%} without")
        if (shown := found.demonstrations) is not None:
            aucs = [f"{values['auc']:.2f} {name}" for name, values in shown.membership.items()]
            typer.echo(f"membership attack, area under the ROC curve: {', '.join(aucs)}")
            alike = [f"{value:.2f} {name}" for name, value in shown.inversion.items()]
            if alike:
                typer.echo(f"inversion, likeness of picture and record: {', '.join(alike)}")
    if not found.passes:
        typer.secho("the bill is refuted: something is broken.", fg="red", err=True)
        raise typer.Exit(1)
    if not as_json:
        alarms = f"a correct bill is flagged in at most {100 * (1 - confidence):.3g} % of audits"
        typer.secho(f"no fault found ({alarms}).", fg="green")
